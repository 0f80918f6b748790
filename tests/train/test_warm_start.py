"""What a training imitates first is checked before a server starts, and imitated once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.export.logged_runs import evaluated, run_export, sums
from tests.train.runs import Run, Started, rows, steps, toy_request
from tinker_cookbook.rl import train as cookbook

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.export.options import Choice
from inspect_tinker_plugin.train import strategies
from inspect_tinker_plugin.train.history import record_run
from inspect_tinker_plugin.train.imitation import find_imitated
from inspect_tinker_plugin.train.run import _imitate_train_test, plan_run, train

pytestmark = [pytest.mark.local]


def export(folder: Path, name: str = "data", *, layout: str = "tinker") -> Path:
    """Write what a scripted model said as an export."""
    if not (folder / "logs").is_dir():
        evaluated(sums(8), lambda request: "abcdefgh", folder / "logs")
    choice = Choice(form="sft", errors="keep")
    run_export(folder / "logs", folder / name, choice, layout=layout, format="jsonl")
    return folder / name


def edited(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change the last row of an export in JSON lines."""
    (file,) = path.glob("*.jsonl")
    *before, last = file.read_text().splitlines()
    row = json.loads(last)
    change(row)
    file.write_text("\n".join([*before, json.dumps(row)]) + "\n")
    return path


def too_long(row: dict[str, Any]) -> None:
    row["messages"][0]["content"] = "word " * 50_000


def unmarked(row: dict[str, Any]) -> None:
    for message in row["messages"]:
        message["trainable"] = False


@pytest.mark.usefixtures("no_server")
def test_what_cannot_be_imitated_is_refused_before_the_server(tmp_path: Path) -> None:
    def says(data: Path, words: str, **changes: Any) -> None:
        with pytest.raises(ConfigError, match=words):
            train(toy_request(tmp_path / "run", warm_start=str(data), **changes))

    says(tmp_path / "nothing", "there is no such folder; `inspect rl export --from-logs")
    (tmp_path / "empty").mkdir()
    says(tmp_path / "empty", "holds no export with a split 'train'")
    wrong = tmp_path / "other"
    wrong.mkdir()
    (wrong / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    says(wrong, "has no column 'messages' but prompt, answer")
    (wrong / "more.jsonl").write_text('{"c": 1}\n')
    says(wrong, "holds no export with a split 'train'")
    says(edited(export(tmp_path, "long"), too_long), r"row 7 has 50,0.* tokens, more than")
    bare = edited(export(tmp_path, "bare", layout="chat"), unmarked)
    says(bare, "row 7 has no words that are marked to be learned")
    good = export(tmp_path)
    loaded = ("load_checkpoint_path=tinker://x",)
    says(good, "--warm-start and load_checkpoint_path exclude each other", overrides=loaded)
    with pytest.raises(Started):
        train(toy_request(tmp_path / "run", warm_start=str(good)))


@pytest.mark.usefixtures("no_server")
def test_a_run_is_not_continued_with_other_data(tmp_path: Path) -> None:
    data = export(tmp_path)
    with pytest.raises(Started):
        train(toy_request(tmp_path / "run", warm_start=str(data)))
    begun = tmp_path / "run" / "imitation"
    begun.mkdir()
    (begun / "checkpoints.jsonl").write_text('{"name": "000002", "batch": 2}\n')
    assert find_imitated(tmp_path / "run") is None
    with pytest.raises(Started):
        train(toy_request(tmp_path / "run", warm_start=str(data)))
    edited(data, lambda row: row["messages"][-1].update(content="other words"))
    with pytest.raises(ConfigError, match="holds a run with data to imitate"):
        train(toy_request(tmp_path / "run", warm_start=str(data)))


def test_a_continued_run_has_the_same_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, folder, configs = export(tmp_path), tmp_path / "run", []

    async def begin(config: Any) -> None:
        configs.append(config)

    monkeypatch.setattr(cookbook, "main", begin)
    (folder / "imitation").mkdir(parents=True)
    row = '{"name": "final", "batch": 2, "state_path": "tinker://imitated"}\n'
    (folder / "imitation" / "checkpoints.jsonl").write_text(row)
    request = toy_request(folder, warm_start=str(data), steps=3)
    for batch in (0, 1):
        run = plan_run(request, models=folder)
        record_run(folder, run.identity())
        assert (run.done is None) == (batch == 0)
        asyncio.run(_imitate_train_test(run, None))
        checkpoint = '{"name": "1", "batch": 1, "state_path": "tinker://1"}\n'
        (folder / "checkpoints.jsonl").write_text(checkpoint)
    assert [each.load_checkpoint_path for each in configs] == ["tinker://imitated"] * 2
    assert strategies._digest(configs[0]) == strategies._digest(configs[1]), "groups are used again"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_killed_in_either_phase_goes_on_and_imitates_once(
    tmp_path: Path, tiny_model: Path
) -> None:
    data, folder = export(tmp_path, layout="chat"), tmp_path / "run"
    options = ("--batch-size", "2", "--group-size", "4", "--steps", "3", "--save-every", "1")
    warm = ("--warm-start", str(data), "--warm-epochs", "12")
    first = Run.start(folder, tiny_model, *options, *warm)
    first.wait_until(lambda: len(rows(folder / "imitation/metrics.jsonl")) >= 4)
    first.kill()
    assert find_imitated(folder) is None
    second = Run.start(folder, tiny_model, *options, *warm)
    second.wait_for_steps(2)
    second.kill()
    start = find_imitated(folder)
    taught = rows(folder / "imitation/metrics.jsonl")
    assert max(row["step"] for row in taught) == 11
    third = Run.start(folder, tiny_model, *options, *warm)
    third.finish()
    assert rows(folder / "imitation/metrics.jsonl") == taught, "it imitated again"
    assert find_imitated(folder) == start
    assert {row["step"] for row in rows(folder / "trained.jsonl")} >= {-1}, "what was imitated"
    assert set(steps(folder)) == {0, 1, 2}
    assert taught[-1]["train_mean_nll"] < taught[0]["train_mean_nll"]
    assert json.loads((folder / "config.json").read_text())["load_checkpoint_path"] in {start, None}
    page = (folder / "report.html").read_text()
    assert "<h2>Imitation</h2>" in page
    assert "<h2>Reward</h2>" in page
