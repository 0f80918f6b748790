"""A dry run reports what a training would do and cost, and what is missing to start it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from inspect_tinker_plugin.cli.main import rl
from inspect_tinker_plugin.cli.train import dry_run
from inspect_tinker_plugin.testing import tokenizer_path
from inspect_tinker_plugin.train.history import RUN
from inspect_tinker_plugin.train.request import TrainRequest

TASK = f"{Path(__file__).parents[2] / 'example_tasks' / 'word_problems.py'}"


def request(folder: Path, **changes: object) -> TrainRequest:
    given: dict[str, object] = {
        "task": TASK,
        "log_dir": folder / "run",
        "model": str(tokenizer_path()),
        "renderer": "qwen3_instruct",
        "learning_rate": 1e-4,
        "batch_size": 5,
        "group_size": 4,
        "max_tokens": 100,
    }
    return TrainRequest(**{**given, **changes})  # type: ignore[arg-type]


def test_a_dry_run_plans_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    text = "\n".join(dry_run(request(tmp_path), {"sample": 1_000_000.0}))
    assert "4 steps of 5 groups of 4 episodes" in text
    # 80 episodes of one reply, of 100 tokens at most, each at a price of 1
    assert "80 episodes" in text
    assert "8,000.00" in text
    assert not (tmp_path / "run").exists()


def test_a_dry_run_of_several_tasks_counts_the_steps_of_all(tmp_path: Path) -> None:
    toy = f"{Path(TASK).parent / 'toy.py'}@letters"
    text = "\n".join(dry_run(request(tmp_path, task=[TASK, toy], mix=[1, 3])))
    # 64 groups of the larger task are within the first 85, of which three of four are its own
    assert "17 steps of 5 groups of 4 episodes" in text


def test_a_dry_run_plays_the_samples_of_the_run(tmp_path: Path) -> None:
    """One sample is a thousand words long, and only the run of that sample is dear."""
    (tmp_path / "task.py").write_text(
        "from inspect_ai import Task, task\n"
        "from inspect_ai.dataset import Sample\n"
        "from inspect_ai.scorer import match\n"
        "@task\n"
        "def two():\n"
        "    texts = {'short': 'Say a.', 'long': 'Say a. ' * 1000}\n"
        "    samples = [Sample(id=n, input=t, target='a') for n, t in texts.items()]\n"
        "    return Task(dataset=samples, scorer=match())\n"
    )

    def prefilled(sample: str) -> float:
        changes = {"task": f"{tmp_path}/task.py@two", "batch_size": 1}
        lines = dry_run(request(tmp_path, **changes, options={"sample_id": sample}))
        [line] = [each for each in lines if "prefilled" in each]
        return float(line.split()[2].replace(",", ""))

    assert prefilled("long") > 50 * prefilled("short")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--reward", "meen"], "unknown reward 'meen'"),
        (["--test-task", "nowhere.py"], "no file nowhere.py"),
        (["--workers", "2", "--ray"], "exclude each other"),
        (["learning_rat=1"], "rl.train.Config"),
        (["--allow-overlap"], "--allow-overlap needs --test-task or --test-split"),
        (["--test-arg", "a=1"], "--test-arg needs --test-task"),
        (["--warm-epochs", "3"], "--warm-epochs needs --warm-start"),
        (["--log-dir", "occupied"], "is a file, not a folder"),
        (["--log-dir", "occupied/run"], "is a file, not a folder"),
        (["--log-dir", "another"], "holds a run with"),
        (["--price", "nowhere.yaml"], "cannot be read"),
        (["--price", "occupied"], "holds no prices"),
        (["--price", "negative.yaml"], "sample = -1 is no number"),
        (["--price", "nan.yaml"], "sample = nan is no number"),
        (["--price", "typo.yaml"], "unknown price 'smaple'"),
    ],
    ids=" ".join,
)
def test_a_dry_run_says_what_cannot_work(
    options: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "occupied").write_text("a note\n")
    for name, text in (("negative", "sample: -1"), ("nan", "sample: .nan"), ("typo", "smaple: 1")):
        (tmp_path / f"{name}.yaml").write_text(text + "\n")
    (tmp_path / "another").mkdir()
    (tmp_path / "another" / RUN).write_text("{}")
    (tmp_path / "another" / "checkpoints.jsonl").write_text(
        '{"name": "000010", "batch": 10, "state_path": "tinker://a"}\n'
    )
    common = ["--model", str(tokenizer_path()), "--renderer", "qwen3_instruct"]
    common += ["--learning-rate", "1e-4", "--dry-run"]
    done = CliRunner().invoke(rl, ["train", TASK, *common, *options])
    assert done.exit_code != 0
    assert says in " ".join(done.output.split())
    assert "unexpected" not in done.output
    assert not (tmp_path / "logs").exists()
