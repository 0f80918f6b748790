"""Headers and summaries that are read from the files of logs are those that Inspect reads."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import pytest
from inspect_ai.log import read_eval_log
from tests.export.logged_runs import adds_and_submits, agent, apart, evaluated

from inspect_tinker_plugin.inspect_internals import log_files
from inspect_tinker_plugin.inspect_internals.log_files import json_items, read_header


@pytest.mark.parametrize("finished", [True, False])
def test_a_header_is_the_one_that_inspect_reads(
    finished: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated(agent(), adds_and_submits, tmp_path / "logs")
    (log,) = (tmp_path / "logs").glob("*.eval")
    if not finished:
        with zipfile.ZipFile(log) as whole, zipfile.ZipFile(tmp_path / "x.eval", "w") as copy:
            for name in whole.namelist():
                if name != "header.json":
                    copy.writestr(name, whole.read(name))
        log = tmp_path / "x.eval"
    else:
        monkeypatch.delattr(log_files, "read_eval_log")
    header = apart(read_header, str(log))
    true = apart(lambda: read_eval_log(str(log), header_only=True))
    assert header.eval == true.eval
    assert header.status == true.status == ("success" if finished else "started")


def test_a_summary_is_read_one_sample_at_a_time() -> None:
    items = [{"a": "[{,}]" * n, "b": [1, {"c": float("inf")}]} for n in range(9)]
    for indent in (None, 2):
        for at_once in (1, 7, 1000):
            text = json.dumps(items, indent=indent)
            assert list(json_items(io.StringIO(text), at_once)) == items
            with pytest.raises(ValueError, match=r"."):
                list(json_items(io.StringIO(text[:-3]), at_once))
    with pytest.raises(ValueError, match="a list"):
        list(json_items(io.StringIO("{}")))
