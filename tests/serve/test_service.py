"""A trainer that lends a sampler gets what a Tinker training of the same replies trains on."""

from __future__ import annotations

import asyncio
import gc
import zlib
from collections.abc import Sequence
from typing import Any

import pytest
import tinker
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from tests.rl.policies import END, Words, encode, plain, renderer, roll_out_task, tool_call
from tests.rl.tasks import adding, agent, arithmetic, crashing
from tests.rl.test_turn_trees import LINES, ON, PLANS, Marked, Step, player, step
from tests.serve.lent import lend
from tinker import TensorData
from tinker_cookbook.completers import StopCondition, TokensWithLogprobs
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages

from inspect_tinker_plugin import ConfigError
from inspect_tinker_plugin.processes import workers
from inspect_tinker_plugin.rl.env import InspectEnv
from inspect_tinker_plugin.serve import Branch, Prompt, RolloutResult, RolloutService, Sampled

OPTIONS: dict[str, Any] = {"group_size": 2}
FORKS = (ON, step("fork", (ON, ON), (ON, ON)), ON, step("compact"), ON)


def datum_of(branch: Branch, advantage: float) -> tinker.Datum:
    """What a trainer makes of a branch, shifted by one as the cookbook does."""

    def shifted(values: Sequence[float]) -> TensorData:
        return TensorData.from_torch(torch.tensor(list(values[1:])))

    mask = [float(each) for each in branch.mask]
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(list(branch.tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": shifted(branch.tokens),
            "logprobs": shifted(branch.logprobs),
            "advantages": shifted([each * advantage for each in mask]),
            "mask": shifted(mask),
        },
    )


def data_of(results: Sequence[RolloutResult]) -> list[tinker.Datum]:
    rewards = [each.reward for each in results]
    assert None not in rewards
    baseline = torch.tensor(rewards).mean()
    return [
        datum_of(branch, float(torch.tensor(each.reward) - baseline))
        for each in results
        for branch in each.branches
    ]


def serve(task: Task, policy: Words, **options: Any) -> list[RolloutResult]:
    service = RolloutService(task, renderer(), **{**OPTIONS, **options})
    return asyncio.run(service.run_group(0, lend(policy, version=3)))


def train(task: Task, policy: Words, **options: Any) -> list[tinker.Datum]:
    group = asyncio.run(roll_out_task(task, policy, limit=1, **{**OPTIONS, **options}))
    return assemble_training_data([group], compute_advantages([group]))[0]


def tree(plan: tuple[Step, ...]) -> Task:
    sample = Sample(id=1, input="Do it.", target="x")
    return Task(dataset=[sample], solver=player(plan), scorer=includes())


class ByPrompt(Words):
    """Says the same to the same prompt, with log-probabilities that tell prompts apart."""

    async def __call__(
        self,
        model_input: tinker.ModelInput,
        stop: StopCondition,
        *,
        max_tokens: int | None = None,
    ) -> TokensWithLogprobs:
        prompt = model_input.to_ints()
        tokens = encode(str(self.lines[sum(prompt) % len(self.lines)]) + END)
        first = -float(zlib.crc32(repr(prompt).encode()) % 1000)
        marks = [first - index for index in range(len(tokens))]
        return TokensWithLogprobs(tokens=tokens, maybe_logprobs=marks, stop_reason="stop")


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=PLANS, lines=st.lists(st.sampled_from(LINES), min_size=1, max_size=5))
@example(plan=(ON, step("fork", (ON, ON), (ON, ON)), ON), lines=LINES)
@example(plan=(step("agents", (ON, ON), (ON, ON), (ON,)), ON), lines=LINES[:1])
@example(plan=(ON, ON, step("compact"), step("aside"), ON), lines=LINES)
def test_branches_are_the_datums_of_a_training_of_the_same_replies(
    plan: tuple[Step, ...], lines: list[str]
) -> None:
    # Conversations side by side ask in another order each time: what is said depends on the prompt.
    results = serve(tree(plan), ByPrompt(lines), group_size=1)
    trained = train(tree(plan), ByPrompt(lines), group_size=1)
    served = sorted(repr(plain(each)) for each in data_of(results))
    assert served == sorted(repr(plain(each)) for each in trained)


CALL = tool_call("bash", '{"cmd": "cat word"}')
SUBMIT = tool_call("submit", '{"answer": "plum"}')


@pytest.mark.parametrize(
    ("task", "lines", "size"),
    [
        pytest.param(arithmetic(), ["1", "2"], 2, id="single turn"),
        pytest.param(adding(), [tool_call("add", '{"x": 0, "y": 1}'), "7", "1"], 2, id="tool"),
        pytest.param(agent(), [CALL, SUBMIT], 1, id="agent in a sandbox"),
    ],
)
def test_rewards_and_datums_are_those_of_a_training(
    task: Task, lines: list[str], size: int
) -> None:
    results = serve(task, Marked(lines), group_size=size)
    trained = train(task, Marked(lines), group_size=size)
    assert [plain(each) for each in data_of(results)] == [plain(each) for each in trained]
    assert all(each.failure is None and each.scores for each in results)


def test_a_group_reward_compares_the_members() -> None:
    results = serve(arithmetic(), Words(["1", "no", "1"]), group_size=3, group_reward="rank")
    assert [each.reward for each in results] == [0.75, 0.0, 0.75]
    assert [each.metrics["group/own_reward"] for each in results] == [1.0, 0.0, 1.0]


def test_spans_say_which_weights_sampled_what() -> None:
    result = serve(adding(), Words([tool_call("add", '{"x": 0, "y": 1}'), "1"]), group_size=1)[0]
    [branch] = result.branches
    assert [each.policy_version for each in branch.spans] == [3, 3]
    assert branch.prompt_tokens == result.turns[0].prompt_tokens
    said = [token for turn in result.turns for token in turn.tokens]
    assert [token for token, mask in zip(branch.tokens, branch.mask, strict=True) if mask] == said
    assert result.turns[0].reply.tool_calls
    assert result.stop_reason == "completed"


def test_turns_arrive_while_the_episode_runs() -> None:
    seen: list[int] = []
    words = Words([tool_call("add", '{"x": 0, "y": 1}'), "1"])
    service = RolloutService(adding(), renderer())

    async def sample(prompt: Prompt) -> Sampled:
        assert len(seen) == len(words.prompts)  # every earlier reply has been read by the task
        return await lend(words)(prompt)

    result = asyncio.run(
        service.run_episode("s0", sample, on_turn=lambda turn: seen.append(len(turn.messages)))
    )
    assert seen == [1, 3]
    assert len(result.turns) == 2


def test_a_failure_is_no_reward_of_zero() -> None:
    task = Task(dataset=[Sample(id=1, input="1+1?", target="2")], scorer=crashing())
    [first, second] = serve(task, Words(["2"]))
    for result in (first, second):
        assert result.reward is None
        assert result.failure is not None
        assert result.failure.cause == "scorer"
        assert "the scorer is broken" in result.failure.message
        assert len(result.turns) == 1  # what was sampled until then


@pytest.mark.parametrize(
    ("tokens", "logprobs", "message"),
    [
        ([1, 2], [-0.1], "1 log-probabilities for 2 tokens"),
        ([1], [float("nan")], "no finite number"),
        ([1, 2], [1e-6, 0.5], "returned 0.5 as a log-probability: it is above 0"),
        ([], [], "an empty reply"),
        ([-1], [-0.1], "something else than token ids"),
    ],
)
def test_what_cannot_be_trained_on_is_the_samplers_failure(
    tokens: list[int], logprobs: list[float], message: str
) -> None:
    async def sample(prompt: Prompt) -> Sampled:
        return Sampled(tokens=tokens, logprobs=logprobs)

    service = RolloutService(arithmetic(), renderer())
    result = asyncio.run(service.run_episode(0, sample))
    assert result.failure is not None
    assert result.failure.cause == "sampler"
    assert message in result.failure.message


@pytest.mark.parametrize("gives", ["nothing", "cancelled"])
def test_a_sampler_that_gives_no_reply_is_its_failure(gives: str) -> None:
    async def sample(prompt: Prompt) -> Sampled:
        if gives == "cancelled":
            raise asyncio.CancelledError
        return None  # type: ignore[return-value]  # what the test is about

    service = RolloutService(arithmetic(), renderer())
    for result in asyncio.run(service.run_group(0, sample, size=2)):
        assert result.failure is not None
        assert result.failure.cause == "sampler"


def test_the_siblings_of_a_failed_rollout_continue() -> None:
    asked: set[str] = set()

    async def sample(prompt: Prompt) -> Sampled:
        asked.add(prompt.episode)
        if len(asked) == 1:
            raise ConnectionError("the engine restarts")
        return await lend(Words(["1"]))(prompt)

    service = RolloutService(arithmetic(), renderer())
    failed, fine = asyncio.run(service.run_group("s0", sample, size=2))
    assert failed.failure is not None
    assert failed.failure.cause == "sampler"
    assert "the engine restarts" in failed.failure.message
    assert (fine.reward, fine.failure) == (1.0, None)


@pytest.mark.parametrize("fails", ["sampler", "scorer"])
def test_failed_rollouts_are_freed_where_collections_are_rare(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def down(prompt: Prompt) -> Sampled:
        raise ConnectionError("the model server is down")

    tasks = {"sampler": arithmetic(), "scorer": Task([Sample(id=1, input="?")], scorer=crashing())}
    samplers = {"sampler": down, "scorer": lend(Words(["2"]))}
    service = RolloutService(tasks[fails], renderer())
    monkeypatch.setattr(workers, "FAILURES", 4)

    async def fail() -> None:
        for _ in range(10):
            [result] = await service.run_group(0, samplers[fails], size=1)
            assert result.failure is not None
            assert result.failure.cause == fails

    def envs() -> set[int]:
        return {id(each) for each in gc.get_objects() if type(each) is InspectEnv}

    before = gc.get_threshold()
    gc.set_threshold(*workers.THRESHOLDS)  # as freeze_memory() does
    gc.disable()
    try:
        known = envs()
        asyncio.run(fail())
        assert len(envs() - known) <= 4
    finally:
        gc.enable()
        gc.set_threshold(*before)


def test_cancelling_a_group_ends_its_episodes_first() -> None:
    begun: list[str] = []
    ended: list[str] = []
    all_begun = asyncio.Event()

    async def sample(prompt: Prompt) -> Sampled:
        begun.append(prompt.episode)
        if len(begun) == 3:
            all_begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(prompt.episode)
        raise AssertionError

    async def run() -> None:
        before = asyncio.all_tasks()  # in a loop that others have used, where Inspect nests loops
        service = RolloutService(agent(), renderer())
        group = asyncio.create_task(service.run_group(0, sample, size=3))
        await all_begun.wait()
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        assert sorted(ended) == sorted(begun)
        assert not asyncio.all_tasks() - before

    asyncio.run(run())


def test_what_there_is_not_is_refused() -> None:
    service = RolloutService(arithmetic(), renderer(), group_reward="rank")
    with pytest.raises(ConfigError, match="has no sample 'other'"):
        service.sample("other")
    with pytest.raises(ConfigError, match="has no sample 4"):
        service.sample(4)
    with pytest.raises(ConfigError, match="compares the episodes of a group"):
        asyncio.run(service.run_episode(0, lend(Words(["1"]))))
