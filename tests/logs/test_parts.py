"""A record that went through a part is in the log what it would have been without."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
from inspect_ai.event import InfoEvent
from inspect_ai.log import (
    EvalConfig,
    EvalDataset,
    EvalLog,
    EvalSample,
    EvalSpec,
    read_eval_log,
    write_eval_log,
)
from inspect_ai.model import ChatMessageAssistant, ChatMessageUser, ModelOutput
from inspect_ai.scorer import Score
from pydantic_core import from_json
from tests.logs.rollouts import apart

from inspect_tinker_plugin.logs.parts import read_part, write_part

LONG = "a long text that becomes an attachment " * 20
HOSTILE = {
    "plain": "an answer",
    "long": LONG,
    "half a pair": "\ud83d and \udc00",
    "zero": "a\x00b\x1b[2J",
    "lines": "a\nb\r\nc\u2028d\u0085e",
    "reference": "attachment://0123456789abcdef0123456789abcdef",
}


def record(text: str) -> EvalSample:
    reply = ChatMessageAssistant(content=text, metadata={text: text})
    return EvalSample(
        id="a/b c",
        epoch=1,
        input=[ChatMessageUser(content=text)],
        target=text,
        messages=[ChatMessageUser(content=text), reply],
        output=ModelOutput.from_content("rl/policy", text),
        scores={"s": Score(value=float("nan"), answer=text, metadata={"big": 2**80, "inf": 1e999})},
        metadata={"deep": {"er": [{"est": text}]}, "small": 5e-324},
        store={"kept": text},
        events=[InfoEvent(data={"text": LONG}), InfoEvent(data=text)],
    )


def written(samples: list[EvalSample], path: Path) -> dict[str, Any]:
    spec = EvalSpec(
        created="2026-01-01T00:00:00+00:00",
        task="task",
        dataset=EvalDataset(),
        model="rl/policy",
        config=EvalConfig(),
    )
    apart(write_eval_log, EvalLog(eval=spec, samples=samples, status="success"), str(path))
    with zipfile.ZipFile(path) as log:
        names = [name for name in log.namelist() if name.startswith(("samples/", "summaries"))]
        return {name: from_json(log.read(name)) for name in names}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_record_is_in_the_log_what_it_would_have_been_without_a_part(
    tmp_path: Path, name: str
) -> None:
    original = record(HOSTILE[name])
    write_part(tmp_path / "part", [original, original])
    stored, other = read_part(tmp_path / "part")
    other.epoch = 2
    twice = original.model_copy(update={"epoch": 2})
    for sample in (stored, other, original, twice):
        assert sample.scores is not None
        sample.scores = {"reward": Score(value=0.1, answer="x"), **sample.scores}
        sample.metadata = {**sample.metadata, "policy_step": 3}
    found = written([stored, other], tmp_path / "found.eval")
    assert repr(found) == repr(written([original, twice], tmp_path / "expected.eval"))
    log = apart(read_eval_log, str(tmp_path / "found.eval"))
    assert log.samples is not None
    assert [sample.epoch for sample in log.samples] == [1, 2]
    assert len(log.samples[0].events) == 2


@pytest.mark.parametrize("damage", [b"", b"[]\n", b'{"id": 1, "epo', b"PK\x03\x04", b"\xff\n"])
def test_a_damaged_part_is_an_error(tmp_path: Path, damage: bytes) -> None:
    write_part(tmp_path / "part", [record("x")])
    whole = (tmp_path / "part").read_bytes()
    (tmp_path / "part").write_bytes((whole + damage) if damage else whole[:-50])
    with pytest.raises(ValueError):
        read_part(tmp_path / "part")
