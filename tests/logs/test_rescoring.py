"""Rewards of logs are computed again: as if they had been the training's from the start."""

from __future__ import annotations

import asyncio
import hashlib
import re
import sys
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from statistics import fmean
from threading import Event
from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai import eval as inspect_eval
from inspect_ai._util.logger import _warned  # private: a warning is given once per process
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog, read_eval_log
from inspect_ai.model import ModelAPI, ModelOutput, model_roles, modelapi
from inspect_ai.scorer import Score, Scorer, Target, accuracy, choice
from inspect_ai.solver import TaskState, generate, multiple_choice
from inspect_ai.util import sandbox
from tests.functions import make_scorer
from tests.logs.rollouts import (
    by_word,
    dataset,
    datums,
    graded_by_word,
    logs_in,
    metrics,
    only_log,
    run_in_thread,
    samples,
    two_turns,
)
from tests.rl.policies import Words
from tests.rl.tasks import sums
from tinker_cookbook.rl.rollouts import do_group_rollout

from inspect_tinker_plugin import EpisodeResult
from inspect_tinker_plugin.cli.main import rl
from inspect_tinker_plugin.contracts.errors import (
    Cause,
    ConfigError,
    EpisodeError,
    InspectRLError,
)
from inspect_tinker_plugin.logs import assemble_pending, figures, trajectory_groups
from inspect_tinker_plugin.logs.rescoring import Rescored, Rescoring, rescore
from inspect_tinker_plugin.tasks.loading import create_from_file

WORDS = [["2", "some words", "2"], ["4", "4", "no no"]]


def rolled(task: Task, folder: Path, words: Sequence[Sequence[str]] = WORDS, **options: Any) -> Any:
    """Roll out a batch, a group per list of words; groups that fail are left failed."""
    size = len(words[0])
    batch = dataset(task, folder, batch_size=len(words), group_size=size, **options).get_batch(0)
    for group, said in zip(batch, words, strict=True):
        with suppress(EpisodeError):
            asyncio.run(do_group_rollout(group, Words(said)))
    run_in_thread(assemble_pending, folder)
    return only_log(folder)


def rescored(log: EvalLog, folder: Path, **how: Any) -> tuple[EvalLog, Rescored]:
    done = asyncio.run(rescore([log.location], Rescoring(output=folder, **how)))
    return only_log(folder), done


def trained_on(log: EvalLog) -> Any:
    return datums(trajectory_groups(samples(log)))


def seen(log: EvalLog) -> list[dict[str, Any]]:
    """What the log says of each rollout, without times."""
    found = []
    for record in sorted(samples(log), key=lambda each: (str(each.id), each.epoch)):
        about = figures(record)
        timed = about.pop("metrics")
        about["metrics"] = {name: timed[name] for name in timed if not name.startswith("time/")}
        scores = {name: score.value for name, score in (record.scores or {}).items()}
        found.append({**about, "scores": scores, "error": record.error and record.error.message})
    return found


def headers(log: EvalLog) -> Any:
    assert log.results is not None
    about = {**(log.eval.metadata or {}), "rescored": None}
    scores = [
        (score.name, score.scorer, {name: each.value for name, each in score.metrics.items()})
        for score in log.results.scores
    ]
    return about, scores, log.eval.headline_metric, log.status


@pytest.mark.parametrize(
    "options",
    [
        {"reward": "first"},
        {"reward": "score:graded_by_word.right"},
        {"reward": "length(mean, target=1, weight=0.5)"},
        {"reward": "turns(mean, target=1, weight=0.5)"},
        {"reward": 'format(mean, pattern="some", weight=0.2)'},
        {"reward": "mean", "group_reward": "rank"},
        {"reward": "mean", "group_reward": "diversity(weight=0.5)"},
        {"reward": "length(mean, target=1)", "group_reward": "best_of(rest=-1)"},
    ],
    ids=str,
)
def test_a_rescored_log_is_that_of_a_training_with_the_reward(
    options: dict[str, Any], tmp_path: Path
) -> None:
    other = "score:graded_by_word.short"
    log = rolled(by_word(), tmp_path / "old", solver=two_turns(), reward=other)
    wanted = rolled(by_word(), tmp_path / "wanted", solver=two_turns(), **options)
    new, done = rescored(log, tmp_path / "new", **options)
    assert (done.computed, done.scored, done.failures) == (6, 0, [])
    assert seen(new) == seen(wanted)
    assert seen(new) != seen(log)
    assert headers(new) == headers(wanted)
    assert trained_on(new) == trained_on(wanted)


def test_a_rollout_that_a_limit_ended_in_its_first_reply_is_rewarded_again(tmp_path: Path) -> None:
    log = rolled(by_word(), tmp_path / "old", token_limit=1)
    new, done = rescored(log, tmp_path / "new")
    assert samples(new)[0].output.empty
    assert (seen(new), done.failures) == (seen(log), [])


def test_a_group_reward_can_be_left_out_again(tmp_path: Path) -> None:
    log = rolled(by_word(), tmp_path / "old", group_reward="rank")
    wanted = rolled(by_word(), tmp_path / "wanted")
    new, _ = rescored(log, tmp_path / "new", no_group_reward=True)
    assert seen(new) == seen(wanted)
    assert trained_on(new) == trained_on(wanted)
    again, _ = rescored(new, tmp_path / "again", group_reward="rank")
    assert seen(again) == seen(log)


@make_scorer(accuracy())
async def reads_a_file(state: TaskState, target: Target) -> Score:
    if "breaks it" in state.output.completion:
        await sandbox().read_file("answer.txt")
    return Score(value=float("right" in state.output.completion))


@pytest.mark.parametrize(
    "options",
    [
        {"reward": 'format(mean, pattern="ANSWER", weight=0.5)'},
        {"reward": "mean", "group_reward": "best_of(rest=-2)"},
    ],
    ids=str,
)
def test_breaking_the_sandbox_pays_no_more_by_another_reward(
    options: dict[str, Any], tmp_path: Path
) -> None:
    task = Task(dataset=sums(1), solver=generate(), scorer=reads_a_file(), sandbox="local")
    words = [["right", "wrong", "breaks it"]]
    log = rolled(task, tmp_path / "old", words)
    wanted = rolled(task, tmp_path / "wanted", words, **options)
    new, _ = rescored(log, tmp_path / "new", **options)
    assert sorted(rewards(log)) == [0, 0, 1]  # members ask in any order
    assert sorted(rewards(new)) == sorted(rewards(wanted))
    by_cause = {one["error_cause"]: one["reward"] for one in seen(new) if one["reward"] <= 0}
    assert by_cause["inside_sandbox"] <= min(rewards(new)) < 0
    assert [each.get_total_rewards() for each in trajectory_groups(samples(new))] == [rewards(new)]
    stated = rolled(task, tmp_path / "stated", words, on_error={"inside_sandbox": -7.0})
    kept, _ = rescored(stated, tmp_path / "kept", **options)
    assert min(rewards(kept)) == -7.0


def test_the_penalties_of_monitors_stay(tmp_path: Path) -> None:
    pytest.importorskip("inspect_sentinel")
    from example_tasks.loophole import first_half

    options: dict[str, Any] = {"sentinel": [first_half()], "monitor_penalty": {"first_half": -0.5}}
    log = rolled(by_word(), tmp_path / "old", **options)
    new, _ = rescored(log, tmp_path / "new")
    assert seen(new) == seen(log)
    assert headers(new) == headers(log)
    assert any(each["metrics"]["reward/monitors_penalty"] for each in seen(new))


judge_is_there = Event()
asked: list[str] = []


@make_scorer(accuracy())
async def needs_judge(state: TaskState, target: Target) -> Score | None:
    """Fails for ``hard``, and gives no number for ``vague``, until the judge is there."""
    said = state.output.completion
    asked.append(said)
    if "hard" in said and not judge_is_there.is_set():
        raise ConnectionError("the judge does not answer")
    if "vague" in said and not judge_is_there.is_set():
        return Score.unscored()
    return Score(value=0.5)


@pytest.fixture(autouse=True)
def no_judge() -> None:
    judge_is_there.clear()
    asked.clear()


def with_judge() -> Task:
    return Task(dataset=sums(2), solver=generate(), scorer=needs_judge())


ASKED = [["easy", "hard", "vague"], ["easy", "easy", "easy"]]


def rewards(log: EvalLog) -> list[Any]:
    return [one["reward"] for one in seen(log)]


@pytest.mark.parametrize("on_error", ["raise", -1.0])
def test_failed_judges_are_asked_again(on_error: Any, tmp_path: Path) -> None:
    log = rolled(with_judge(), tmp_path / "old", ASKED, on_error=on_error)
    before = rewards(log)
    assert before[3:] == [0.5, 0.5, 0.5]
    assert None in before[:3] or -1.0 in before[:3]
    judge_is_there.set()
    asked.clear()
    new, done = rescored(log, tmp_path / "new", failed=True)
    ended = [one["status"] for one in seen(log)].count("cut")
    assert done.failures == []
    assert [r for r in rewards(new) if r is not None] == [0.5] * (6 - ended)
    assert set(asked) <= {"hard", "vague"}
    assert done.scored == len(asked) > 0
    graded = [one["reward"] for one in seen(new) if one["status"] == "graded"]
    paid = [
        value for group in trajectory_groups(samples(new)) for value in group.get_total_rewards()
    ]
    assert paid == graded
    assert not [one for one in seen(new) if one["error"] and one["status"] != "cut"]


@make_scorer(accuracy())
async def needs_judge_of_choices(state: TaskState, target: Target) -> Score | None:
    if not judge_is_there.is_set():
        raise ConnectionError("the judge does not answer")
    return await choice()(state, target)


def test_a_scorer_of_choices_sees_what_the_solver_has_marked(tmp_path: Path) -> None:
    questions = [
        Sample(id=n, input="?", choices=["one", "two", "three " * 100], target="B") for n in (1, 2)
    ]
    solver = multiple_choice(shuffle=Random(6))  # an order for each, which it hides afterwards
    task = Task(dataset=questions, solver=solver, scorer=needs_judge_of_choices())
    words = [[f"ANSWER: {letter}" for letter in "ABC"]] * 2
    log = rolled(task, tmp_path / "old", words, on_error=-1.0)
    assert rewards(log) == [-1.0] * 6
    judge_is_there.set()
    new, done = rescored(log, tmp_path / "new", failed=True)
    assert done.failures == []
    for each in samples(new):
        assert figures(each)["reward"] == float(each.output.completion == "ANSWER: B")
    assert 0 < sum(rewards(new)) < 6


SHORT = "score:graded_by_word.short"


@pytest.mark.parametrize(
    "on_error",
    ["raise", -1.0, {"scorer": -2.0, "unscored": -3.0}, {Cause.SCORER: -2.0, Cause.UNSCORED: -3.0}],
    ids=["raise", "number", "by name", "by cause"],
)
@pytest.mark.parametrize(("before", "reward"), [("mean", SHORT), (SHORT, "mean")])
def test_a_judge_that_fails_again_costs_what_it_would_in_a_training(
    on_error: Any, before: str, reward: str, tmp_path: Path
) -> None:
    """Also where the reward does not read its score."""
    task = Task(dataset=sums(3), solver=generate(), scorer=[graded_by_word(), needs_judge()])
    asked = [["easy"], ["hard"], ["vague"]]
    log = rolled(task, tmp_path / "old", asked, reward=before, on_error=on_error)
    wanted = rolled(task, tmp_path / "wanted", asked, reward=reward, on_error=on_error)
    new, done = rescored(log, tmp_path / "new", reward=reward)
    assert [one.id for one in done.failures] == (["s1", "s2"] if reward == "mean" else ["s1"])
    assert "needs_judge were run again and failed: ConnectionErr" in done.failures[0].reason
    assert outcomes(new) == outcomes(wanted)
    assert (new.eval.metadata or {})["errors"] == (wanted.eval.metadata or {})["errors"]
    assert metrics(new, "reward") == metrics(wanted, "reward")
    if on_error != "raise":  # what a training did not get cannot become a datum
        assert trained_on(new) == trained_on(wanted)


def broken(members: Sequence[Any]) -> list[float]:
    raise ValueError("it is broken")


def test_what_a_group_reward_that_failed_had_cost_does_not_stay(tmp_path: Path) -> None:
    task = Task(dataset=sums(1), solver=generate(), scorer=[graded_by_word(), needs_judge()])
    asked, on_error = [["easy", "hard"]], {"reward": -5.0, "scorer": -2.0}
    log = rolled(task, tmp_path / "old", asked, group_reward=broken, on_error=on_error)
    assert rewards(log) == [-5.0, -5.0]
    wanted = rolled(task, tmp_path / "wanted", asked, on_error=on_error)
    new, _ = rescored(log, tmp_path / "new", no_group_reward=True)
    assert outcomes(new) == outcomes(wanted)
    assert trained_on(new) == trained_on(wanted)


def outcomes(log: EvalLog) -> Any:
    names = ("reward", "error_cause", "scores")
    return [[*(one[name] for name in names), bool(one["error"])] for one in seen(log)]


def test_the_same_call_only_makes_what_is_missing_or_failed(tmp_path: Path) -> None:
    good = rolled(by_word(), tmp_path / "good")
    bad = rolled(with_judge(), tmp_path / "bad", ASKED, on_error=-1.0)
    logs = [each.location.removeprefix("file://") for each in (good, bad)]
    before = [hashlib.sha256(Path(log).read_bytes()).digest() for log in logs]
    how = Rescoring(output=tmp_path / "new", reward="mean")
    assert asyncio.run(rescore(logs, how)).earlier == 0
    judge_is_there.set()
    again = asyncio.run(rescore(logs, how))
    assert (again.earlier, again.failures, len(again.logs)) == (1, [], 2)
    assert asyncio.run(rescore(logs, how)).earlier == 2
    assert before == [hashlib.sha256(Path(log).read_bytes()).digest() for log in logs]
    with pytest.raises(ConfigError, match="is there already and is not what this command makes"):
        asyncio.run(rescore(logs, Rescoring(output=tmp_path / "new", reward="first")))
    assert not [path for path in (tmp_path / "new").iterdir() if path.suffix != ".eval"]


def test_one_call_at_a_time_writes_to_a_folder(tmp_path: Path) -> None:
    log = rolled(by_word(), tmp_path / "old")
    refused: list[pytest.ExceptionInfo[ConfigError]] = []

    def at_the_same_time(*progress: int) -> None:
        with pytest.raises(ConfigError, match="written by another") as info:
            run_in_thread(lambda: rescored(log, tmp_path / "new", reward="first"))
        refused.append(info)

    how = Rescoring(output=tmp_path / "new", reward="mean")
    asyncio.run(rescore([log.location], how, on_progress=at_the_same_time))
    assert refused
    new = only_log(tmp_path / "new")
    assert new.eval.metadata is not None
    assert new.eval.metadata["reward_expression"] == "mean"


@make_scorer(accuracy())
async def is_busy(state: TaskState, target: Target) -> Score:
    """Answers from as many calls on as words were said."""
    said = state.output.completion
    asked.append(said)
    if (calls := asked.count(said)) <= len(said.split()):
        raise ConnectionError("the judge is busy")
    return Score(value=calls)


def test_the_same_call_asks_only_for_scores_that_are_missing(tmp_path: Path) -> None:
    task = Task(dataset=sums(1), solver=generate(), scorer=is_busy())
    log = rolled(task, tmp_path / "old", [["a", "a b", "a b c"]], on_error=-1.0)
    made = []
    for _ in range(3):
        new, done = rescored(log, tmp_path / "new", failed=True)
        made.append((rewards(new), done.scored))
    assert made == [([2, -1, -1], 3), ([2, 3, -1], 2), ([2, 3, 4], 1)]
    assert [one["status"] for one in seen(new)] == ["graded"] * 3
    assert [each.get_total_rewards() for each in trajectory_groups(samples(new))] == [[2, 3, 4]]


@modelapi("logs_number")
class Number(ModelAPI):
    """Answers with its name."""

    async def generate(self, *args: Any, **options: Any) -> ModelOutput:
        return ModelOutput.from_content(self.model_name, self.model_name)


@make_scorer(accuracy())
async def by_judge(state: TaskState, target: Target) -> Score:
    found = model_roles()["judge"]
    judges = found if isinstance(found, list) else [found]
    return Score(value=fmean([float((await each.generate("?")).completion) for each in judges]))


def without_a_number(folder: Path) -> Any:
    task = Task(dataset=sums(1), solver=generate(), scorer=by_judge())
    options: dict[str, Any] = {"model_roles": {"judge": "logs_number/nan"}, "on_error": -1.0}
    return rolled(task, folder, [["a", "b"]], **options)


@pytest.mark.parametrize("name", ["logs_number/0.5", ["logs_number/0.25", "logs_number/0.75"]])
def test_other_judges_may_be_given_by_name(name: str | list[str], tmp_path: Path) -> None:
    log = without_a_number(tmp_path / "old")
    new, done = rescored(log, tmp_path / "new", roles={"judge": name})
    assert (rewards(new), done.failures) == ([0.5, 0.5], [])


def test_a_call_with_another_judge_continues_none(tmp_path: Path) -> None:
    log = without_a_number(tmp_path / "old")
    rescored(log, tmp_path / "new", roles={"judge": "logs_number/0.5"})
    for other in ({"judge": "logs_number/0.25"}, {}):
        with pytest.raises(
            ConfigError, match=r"is not what this command makes \(it differs in judges"
        ):
            rescored(log, tmp_path / "new", roles=other)
    new, done = rescored(log, tmp_path / "new", roles={"judge": "logs_number/0.5"})
    assert (rewards(new), done.earlier) == ([0.5, 0.5], 1)
    assert (new.eval.metadata or {})["rescored"]["judges"] == {"judge": "logs_number/0.5"}


def test_what_a_killed_call_was_writing_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = rolled(by_word(), tmp_path / "old")
    with monkeypatch.context() as killed:  # neither renamed nor removed: the process is gone
        killed.setattr("os.replace", lambda *_: None)
        killed.setattr(Path, "unlink", lambda *_, **__: None)
        asyncio.run(rescore([log.location], Rescoring(output=tmp_path / "new")))
    assert any(path.suffix == ".writing" for path in (tmp_path / "new").iterdir())
    rescored(log, tmp_path / "new")
    assert {path.suffix for path in (tmp_path / "new").iterdir()} == {".eval"}


FILE = """
import os
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, mean, scorer
from inspect_ai.solver import generate
from worth_of_{name} import WORTH

@scorer(metrics=[mean()])
def judged():
    async def score(state, target):
        if os.environ["JUDGE"] == "down":
            raise ConnectionError("the judge is down")
        return Score(value=WORTH)
    return score

@task
def {name}():
    return Task(dataset=[Sample(id=1, input="?")], solver=generate(), scorer=judged())
"""


def test_scorers_of_files_are_those_of_the_logs_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE", "down")
    logs = []
    for name, worth in [("apples", 0.25), ("pears", 0.75)]:
        folder = tmp_path / name
        folder.mkdir()
        (folder / f"worth_of_{name}.py").write_text(f"WORTH = {worth}")
        (folder / "task.py").write_text(FILE.format(name=name))
        task = create_from_file(folder / "task.py", name, {})
        logs.append(rolled(task, folder / "old", [["a", "b"]], on_error=-1.0))
        del sys.modules[f"worth_of_{name}"]
    monkeypatch.setenv("JUDGE", "up")
    how = Rescoring(output=tmp_path / "new", failed=True)
    done = asyncio.run(rescore([log.location for log in logs], how))
    assert done.failures == []
    assert [rewards(read_eval_log(str(log))) for log in done.logs] == [[0.25] * 2, [0.75] * 2]


@make_scorer(accuracy(), name="logs_package/judged")
async def of_package(state: TaskState, target: Target) -> Score | None:
    return await needs_judge()(state, target)


@make_scorer(accuracy(), name="logs_package/includes")
async def of_package_named_as_one_of_inspect(state: TaskState, target: Target) -> Score | None:
    return await needs_judge()(state, target)


@pytest.mark.parametrize("scorer", [of_package, of_package_named_as_one_of_inspect])
def test_scorers_of_packages_are_found_by_their_whole_names(
    scorer: Callable[[], Scorer], tmp_path: Path
) -> None:
    task = Task(dataset=sums(1), solver=generate(), scorer=scorer())
    log = rolled(task, tmp_path / "old", [["hard", "vague"]], on_error=-1.0)
    judge_is_there.set()
    new, done = rescored(log, tmp_path / "new", failed=True)
    assert (rewards(new), done.failures) == ([0.5, 0.5], [])


@make_scorer(accuracy())
async def twice(state: TaskState, target: Target, applies: bool) -> Score | None:
    return await needs_judge()(state, target) if applies else None


def test_a_scorer_keeps_its_name_when_another_of_this_name_gives_no_score(tmp_path: Path) -> None:
    scorers = [twice(applies=False), twice(applies=True)]
    task = Task(dataset=sums(1), solver=generate(), scorer=scorers)
    options: dict[str, Any] = {"on_error": -1.0, "reward": "score:twice1"}
    log = rolled(task, tmp_path / "old", [["hard", "vague", "easy"]], **options)
    judge_is_there.set()
    new, done = rescored(log, tmp_path / "new", failed=True)
    assert (rewards(new), done.failures) == ([0.5] * 3, [])
    assert [set(one["scores"]) for one in seen(new)] == [{"reward", "twice1"}] * 3


def words_are_dear(result: EpisodeResult) -> float:
    return -float(len(result.state.output.completion.split()))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({}, "was rewarded by 'words_are_dear', which is no expression; give --reward"),
        ({"reward": "score:write"}, "names the score 'write', which no score of .*there is graded"),
        ({"reward": "meen"}, "meen"),
        ({"reward": "mean", "group_reward": "rnak"}, "rnak"),
        ({"reward": "mean", "roles": {"judge": "no_such_provider/1"}}, "no_such_provider"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    how: dict[str, Any], says: str, tmp_path: Path
) -> None:
    log = rolled(by_word(), tmp_path / "old", reward=words_are_dear)
    with pytest.raises(ConfigError, match=says):
        asyncio.run(rescore([log.location], Rescoring(output=tmp_path / "new", **how)))
    assert not (tmp_path / "new").exists()


def test_a_log_without_rewards_and_its_own_folder_are_refused(tmp_path: Path) -> None:
    def run() -> str:
        (log,) = inspect_eval(
            by_word(), model="mockllm/model", log_dir=str(tmp_path), display="none", limit=1
        )
        return str(log.location)

    other = run_in_thread(run)
    with pytest.raises(ConfigError, match=r"is no log of rollouts.*`inspect score`"):
        asyncio.run(rescore([other], Rescoring(output=tmp_path / "new")))
    with pytest.raises(ConfigError, match="is the folder of"):
        asyncio.run(rescore([other], Rescoring(output=tmp_path)))


def test_a_log_whose_samples_are_damaged_is_named(tmp_path: Path) -> None:
    log = Path(rolled(by_word(), tmp_path / "old").location.removeprefix("file://"))
    with zipfile.ZipFile(log) as parts:
        place = next(i.header_offset for i in parts.infolist() if i.filename.startswith("samples/"))
    content = bytearray(log.read_bytes())
    content[place + 120 : place + 180] = bytes(60)
    log.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{re.escape(log.name)} cannot be read"):
        asyncio.run(rescore([str(log)], Rescoring(output=tmp_path / "new")))
    assert not (tmp_path / "new").exists()  # nor an empty folder


@pytest.mark.parametrize(("folder", "left"), [("old", "cannot be read"), ("new", "was moved or")])
def test_a_folder_that_goes_meanwhile_is_an_error(folder: str, left: str, tmp_path: Path) -> None:
    logs = [rolled(by_word(), tmp_path / "old" / name).location for name in ("a", "b")]

    def move(*progress: int) -> None:
        if not (tmp_path / "moved").exists():
            (tmp_path / folder).rename(tmp_path / "moved")

    how = Rescoring(output=tmp_path / "new")
    with pytest.raises(InspectRLError, match=rf"{folder}.*{left}"):
        asyncio.run(rescore(logs, how, on_progress=move))


def test_the_command_says_what_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rolled(with_judge(), tmp_path / "old", ASKED, on_error=-1.0)
    options = ["rescore", str(tmp_path / "old"), "-o", str(tmp_path / "new"), "--failed"]
    _warned.clear()
    with pytest.raises(SystemExit) as left:
        run_in_thread(lambda: rl(options, standalone_mode=False))
    assert left.value.code == 3
    said = capsys.readouterr()
    assert "sample s0, epoch 2: the scorers needs_judge were run again and failed" in said.err
    assert "1 log" in said.out
    assert "0 rewards computed, scorers of 2 rollouts run again; 2 failed." in said.out
    assert not [warning for warning in _warned if "Headline" in warning]
    assert len(logs_in(tmp_path / "new")) == 1
