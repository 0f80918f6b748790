from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task, eval_async, task
from inspect_ai.agent import Agent, AgentState
from inspect_ai.agent import agent as make_agent
from inspect_ai.approval import ApprovalPolicy, auto_approver
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalSample, list_eval_logs, read_eval_log, read_eval_log_sample_summaries
from inspect_ai.model import ChatMessageAssistant, Model, ModelOutput, ModelUsage, get_model
from inspect_ai.review import Review, Reviewer, ReviewPolicy, reviewer
from inspect_ai.scorer import Score, Target, match, mean
from inspect_ai.solver import TaskState, chain, generate
from inspect_ai.viewer import ViewerConfig
from tests.functions import make_scorer
from tests.logs.rollouts import (
    by_word,
    dataset,
    figures,
    graded_by_word,
    logged,
    metrics,
    only_log,
    rewards,
    run_in_thread,
    samples,
    scorer_called_reward,
    two_turns,
)
from tests.rl.policies import Words, roll_out_task, tool_call
from tests.rl.tasks import agent, arithmetic, sums
from tinker_cookbook.completers import StopCondition, TokensWithLogprobs
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
from tinker_cookbook.rl.rollouts import do_group_rollout

from inspect_tinker_plugin import logs
from inspect_tinker_plugin.contracts.errors import EpisodeError
from inspect_tinker_plugin.logs import assemble_pending
from inspect_tinker_plugin.logs.rollout import own_metadata, read_group
from inspect_tinker_plugin.testing import scripted_model


@make_scorer({"*": [mean()]})
async def many_keys(state: TaskState, target: Target) -> Score:
    count = 60 if "many" in state.output.completion else 2
    long = {"long" * 300: 1.0} if count == 2 else {}
    return Score(value={f"key_{number}": number / 60 for number in range(count)} | long)


@make_scorer(mean())
async def asks_a_judge(state: TaskState, target: Target, judge: Model, note: str) -> Score:
    await judge.generate(note)
    return Score(value=1.0)


async def test_events_of_scores_say_what_those_of_an_eval_say(tmp_path: Path) -> None:
    reply = ModelOutput.from_content("scripted", "2")
    reply.usage = ModelUsage(input_tokens=3, output_tokens=4, total_tokens=7)

    def judged() -> Task:
        judge = scripted_model(lambda _: reply)
        scorers = [match(location="any"), asks_a_judge(judge, "x" * 200)]
        return Task(dataset=sums(1), solver=generate(), scorer=scorers, name="judged")

    def events(record: EvalSample) -> list[Any]:
        scores = [event for event in record.events if event.event == "score"]
        return [
            (event.scorer, event.score.value, event.scorer_args, sorted(event.model_usage or ()))
            for event in scores
        ]

    policy = get_model("mockllm/policy", custom_outputs=[reply])
    [log] = await eval_async(judged(), model=policy, log_dir=str(tmp_path / "eval"))
    expected = events((log.samples or [])[0])
    folder = tmp_path / "rollouts"
    rolled = await logged(dataset(judged(), folder, group_size=1), folder, ["2"])
    found = events(samples(rolled)[0])
    assert [each[:3] for each in found] == [each[:3] for each in expected]
    assert found[0][2] == {"location": "any"}
    assert [each[3] for each in expected] == [
        ["mockllm/policy"],
        ["mockllm/policy", "scripted/model"],
    ]
    assert [each[3] for each in found] == [["rl/policy"], ["rl/policy", "scripted/model"]]


class Breaking(Words):
    """A sampler that goes away after the first reply."""

    async def __call__(
        self, model_input: Any, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        if self.prompts:
            raise ConnectionError("the sampler is gone")
        return await super().__call__(model_input, stop, max_tokens=max_tokens)


async def test_a_batch_is_one_log_with_messages_scores_reward_and_step(tmp_path: Path) -> None:
    limits: Any = {"max_turns": 3, "token_limit": "output:1m"}
    data = dataset(arithmetic(4), tmp_path, batch_size=2, group_size=2, **limits)
    log = await logged(data, tmp_path, ["3", "nine"], batch=1)
    assert log.status == "success"
    assert (log.eval.task, log.eval.model) == ("arithmetic", "rl/policy")
    assert log.eval.task_args == {"count": 4}
    assert log.eval.config.epochs == 2
    assert log.eval.config.turn_limit == 3
    assert log.eval.config.token_limit == 1_000_000
    assert log.eval.config.token_limit_type == "output"
    assert log.eval.dataset.samples == 4
    assert log.eval.config.limit == 2, "the viewer counts 4 of 4 samples: limit times epochs"
    assert log.eval.model_args == {"policy_step": 1}
    assert [(s.scores or {})["reward"].answer for s in samples(log)[::2]] == ["3", "nine"]
    assert "inspect-tinker-plugin" in log.eval.packages
    assert (log.metadata["batch"], log.metadata["policy_step"]) == (1, 1)
    assert log.metadata["group_size"] == 2
    assert log.metadata["reward_expression"] == "mean"

    assert [(sample.id, sample.epoch) for sample in samples(log)] == [
        ("s2", 1),
        ("s3", 1),
        ("s2", 2),
        ("s3", 2),
    ]
    first = samples(log)[0]
    assert [message.text for message in first.messages] == ["2+1?", "3"]
    assert rewards(log) == [1.0, 0.0, 0.0, 0.0]
    assert (first.scores or {})["match"].value == "C"
    assert "stop: completed" in ((first.scores or {})["reward"].explanation or "")
    assert first.model_usage["rl/policy"].output_tokens == 2
    assert {event.event for event in first.events} >= {"sample_init", "model", "score"}
    assert figures(log, "stop_reason") == ["completed"] * 4
    assert figures(log, "datums") == [1] * 4
    assert figures(log, "policy_step") == [1] * 4
    assert figures(log, "tokens")[0]["sampled"] == 2


async def test_the_header_alone_shows_reward_scores_tokens_and_stop_reasons(tmp_path: Path) -> None:
    data = dataset(by_word(2), tmp_path, batch_size=2, reward="score:graded_by_word.right")
    await logged(data, tmp_path, ["1"])
    (info,) = list_eval_logs(str(tmp_path))
    log = run_in_thread(lambda: read_eval_log(info.name, header_only=True))
    assert log.results is not None
    assert log.results.scores[0].name == "reward"
    assert log.results.headline is not None
    assert log.results.headline.score == "reward"
    as_inspects_std = 0.5**0.5
    assert metrics(log, "reward") == {"mean": 0.5, "std": pytest.approx(as_inspects_std)}
    assert metrics(log, "right")["mean"] == 0.5
    assert metrics(log, "short")["mean"] == 1.0
    rollouts = metrics(log, "rollouts")
    assert (rollouts["graded"], rollouts["stop: completed"], rollouts["datums"]) == (2, 2, 1.0)
    assert log.stats.model_usage["rl/policy"].output_tokens == 4
    summaries = run_in_thread(lambda: read_eval_log_sample_summaries(info.name))
    assert [(one.scores or {})["reward"].value for one in summaries] == [1.0, 0.0]


async def test_tool_calls_in_a_sandbox_are_in_the_log(tmp_path: Path) -> None:
    calls = [tool_call("bash", '{"command":"cat word"}'), tool_call("submit", '{"answer":"plum"}')]
    log = await logged(dataset(agent(), tmp_path), tmp_path, calls)
    (sample,) = samples(log)
    asked = [m for m in sample.messages if isinstance(m, ChatMessageAssistant) and m.tool_calls]
    assert [call.function for m in asked for call in m.tool_calls or ()] == ["bash"]
    assert "plum" in next(m.text for m in sample.messages if m.role == "tool")
    assert {"tool", "sandbox"} <= {event.event for event in sample.events}
    assert sample.files == ["word"]
    assert rewards(log) == [1.0]
    assert figures(log, "turns") == [2]
    assert figures(log, "datums") == [1]


async def test_the_logged_reward_is_what_the_trainer_got(tmp_path: Path) -> None:
    data = dataset(arithmetic(1), tmp_path, group_size=3, group_reward="rank")
    group = await do_group_rollout(data.get_batch(0)[0], Words(["1", "7", "8"]))
    assemble_pending(tmp_path)
    assert rewards(only_log(tmp_path)) == group.get_total_rewards()
    assert only_log(tmp_path).metadata["group_reward_expression"] == "rank"


async def test_a_failed_group_is_in_the_log_with_its_error_and_the_others_are_too(
    tmp_path: Path,
) -> None:
    failing, fine = dataset(by_word(2), tmp_path, batch_size=2, group_size=1).get_batch(0)
    with pytest.raises(EpisodeError):
        await do_group_rollout(failing, Words(["crash"]))
    await do_group_rollout(fine, Words(["2"]))
    assemble_pending(tmp_path)

    log = only_log(tmp_path)
    broken, good = samples(log)
    assert broken.error is not None
    assert "the scorer is broken" in broken.error.message
    assert "ValueError" in broken.error.traceback
    assert broken.messages[-1].text == "crash"
    assert "reward" not in (broken.scores or {})
    assert good.error is None
    assert (good.scores or {})["reward"].value == 1.0
    assert figures(log, "status") == ["failed", "graded"]
    assert figures(log, "error_cause") == ["scorer", None]
    assert log.metadata["errors"] == {"scorer": 1}
    assert metrics(log, "rollouts")["error: scorer"] == 1
    assert metrics(log, "reward")["mean"] == 1.0
    assert log.results is not None
    assert (log.results.total_samples, log.results.completed_samples) == (2, 1)


async def test_a_retried_rollout_is_there_beside_its_failure(tmp_path: Path) -> None:
    data = dataset(by_word(1), tmp_path, group_size=2)
    lines, strategy = ["crash", "1", "1"], RetryOnFailure(max_retries=1)
    log = await logged(data, tmp_path, lines, strategy=strategy)
    assert [sample.epoch for sample in samples(log)] == [1, 2, 3]
    assert sorted(figures(log, "status")) == ["failed", "graded", "graded"]
    assert metrics(log, "reward")["mean"] == 1.0


async def test_a_penalty_stands_beside_the_error_that_it_is_for(tmp_path: Path) -> None:
    log = await logged(
        dataset(by_word(1), tmp_path, on_error={"scorer": -1.0}), tmp_path, ["crash"]
    )
    assert rewards(log) == [-1.0]
    assert samples(log)[0].error is not None
    assert figures(log, "error_cause") == ["scorer"]


async def test_a_rollout_that_was_cut_off_shows_how_far_it_came(tmp_path: Path) -> None:
    task = Task(dataset=sums(1), solver=two_turns(), scorer=match())
    (builder,) = dataset(task, tmp_path).get_batch(0)
    with pytest.raises(ConnectionError):
        await do_group_rollout(builder, Breaking(["first words"]))
    assemble_pending(tmp_path)
    log = only_log(tmp_path)
    (sample,) = samples(log)
    assert sample.messages[-1].text == "first words"
    assert sample.error is not None
    assert "stopped before" in sample.error.message
    assert figures(log, "status") == ["cut"]


@reviewer
def lets_pass(level: int = 2) -> Reviewer:
    async def review(*args: Any, **kwargs: Any) -> Review:
        return Review(decision="continue")

    return review


@make_agent
def asks_once(words: str, turns: int = 1) -> Agent:
    async def execute(state: AgentState) -> AgentState:
        state.output = await get_model().generate(state.messages)
        state.messages.append(state.output.message)
        return state

    return execute


@task(attribs={"kind": "toy"})
def described(count: int, level: int = 1) -> Task:
    return Task(
        dataset=sums(count),
        solver=generate(),
        scorer=match(),
        approval=[ApprovalPolicy(auto_approver("reject"), ["bash", "python"])],
        review=[ReviewPolicy(lets_pass(level), "add*")],
        score_on_error=True,
        display_name="By word",
        tags=["words"],
        viewer=ViewerConfig(),
    )


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"solver": two_turns()},
        {"solver": asks_once("few")},
        {"solver": chain(two_turns(), asks_once("few"))},
    ],
    ids=["the task's", "another", "an agent", "a chain"],
)
async def test_a_header_describes_task_and_solver_as_that_of_an_eval(
    own: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the commit is that of the task's folder
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with which Inspect looks for none
    log = await logged(dataset(described(1), tmp_path / "own", **own), tmp_path / "own", ["2"])
    [wanted] = await eval_async(described(1), model="mockllm/model", log_dir=str(tmp_path), **own)
    same = {"task_display_name", "task_attribs", "viewer", "revision"}
    same |= {"solver", "solver_args", "solver_args_passed", "task_args", "task_args_passed"}
    assert log.eval.model_dump(include=same) == wanted.eval.model_dump(include=same)
    run = {"approval", "review", "score_on_error"}
    assert log.eval.config.model_dump(include=run) == wanted.eval.config.model_dump(include=run)
    assert log.plan == wanted.plan
    assert log.plan.steps
    assert set(log.eval.tags or []) == {*(wanted.eval.tags or []), "rollouts", "train"}
    form = r"\d+-\d+-\d+T\d+-\d+-\d+-00-00_.*"  # of the time, without characters of URLs
    assert all(re.fullmatch(form, Path(each.location).name) for each in (log, wanted))


async def test_the_headline_of_a_batch_without_a_reward_is_no_number(tmp_path: Path) -> None:
    scorers = [match(), graded_by_word()]
    task = Task(dataset=sums(1), solver=generate(), scorer=scorers)
    with pytest.raises(EpisodeError):
        await logged(dataset(task, tmp_path), tmp_path, ["crash"])
    assemble_pending(tmp_path)
    log = only_log(tmp_path)
    assert log.results is not None
    assert log.results.headline is not None
    assert math.isnan(metrics(log, str(log.results.headline.scorer))["mean"])
    assert metrics(log, "match")["mean"] == 0.0


async def test_a_scorer_called_reward_keeps_its_name(tmp_path: Path) -> None:
    task = Task(dataset=sums(1), solver=generate(), scorer=[match(), scorer_called_reward()])
    log = await logged(dataset(task, tmp_path, reward="score:match"), tmp_path, ["1"])
    assert rewards(log) == [0.25]
    assert (samples(log)[0].scores or {})["rl_reward"].value == 1.0
    assert metrics(log, "rl_reward")["mean"] == 1.0
    assert log.results is not None
    assert log.results.headline is not None
    assert log.results.headline.score == "rl_reward"


async def test_however_many_metrics_a_rollout_has_summaries_have_them_too(tmp_path: Path) -> None:
    own = {"inspect_rl_2": 1, "my_inspect_rl": 2}
    task = Task(
        dataset=[Sample(id=1, input="", target="1", metadata=own)],
        solver=generate(),
        scorer=many_keys(),
    )
    log = await logged(dataset(task, tmp_path, group_size=2), tmp_path, ["many", "few"])
    seen = [logs.figures(record) for record in samples(log)]
    scored = [[name for name in each["metrics"] if "key_" in name] for each in seen]
    assert [len(names) for names in scored] == [60, 2]
    assert all(
        {*names} <= {*each["reward_metrics"]} for names, each in zip(scored, seen, strict=True)
    )
    summaries = run_in_thread(read_eval_log_sample_summaries, log.location)
    of_summaries = [logs.figures(summary) for summary in summaries]
    assert of_summaries[0] == seen[0]
    missing = seen[1]["metrics"].keys() - of_summaries[1]["metrics"].keys()
    assert missing == {f"score/many_keys.{'long' * 300}"}, "Inspect keeps no name of that length"
    assert of_summaries[1]["reward"] == seen[1]["reward"]
    assert [own_metadata(record) for record in samples(log)] == [own, own]
    group = run_in_thread(read_group, Path(log.location.removeprefix("file://")), 0)
    assert [record.epoch for record in group] == [1, 2], "a run that is continued takes both"


async def test_samples_that_share_an_id_and_metadata_of_the_same_name_are_kept(
    tmp_path: Path,
) -> None:
    twins = [
        Sample(id="twin", input=text, target="1", metadata={"inspect_rl": text})
        for text in ("first", "second")
    ]
    task = Task(dataset=twins, solver=generate(), scorer=match())
    log = await logged(dataset(task, tmp_path, batch_size=2, group_size=2), tmp_path, ["1"])
    assert [sample.epoch for sample in samples(log)] == [1, 2, 3, 4]
    assert [sample.input for sample in samples(log)] == ["first"] * 2 + ["second"] * 2
    assert {sample.metadata["inspect_rl"] for sample in samples(log)} == {"first", "second"}
    assert rewards(log) == [1.0] * 4


async def test_no_log_is_written_unless_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INSPECT_LOG_DIR", str(tmp_path / "logs"))
    await roll_out_task(arithmetic(1), ["1"])
    assert os.listdir(tmp_path) == []


async def test_what_is_no_score_leaves_a_log_that_can_be_read(tmp_path: Path) -> None:
    @make_scorer(mean())
    async def forgets(state: TaskState, target: Target) -> Score:
        return Score(value=1) if state.output.completion == "3" else 1  # type: ignore[return-value]

    task = Task(dataset=sums(1), solver=generate(), scorer=forgets(), name="forgets")
    for builder in dataset(task, tmp_path, group_size=2).get_batch(0):
        with pytest.raises(EpisodeError, match="Score"):
            await do_group_rollout(builder, Words(["3", "4"]))
    assemble_pending(tmp_path)
    assert [sample.error is None for sample in samples(only_log(tmp_path))] == [True, False]
