"""Whatever conversations an episode holds, the trainer learns each sampled token once.

A solver plays random trees of conversations through the real group builder and the cookbook's
``do_group_rollout``; what the cookbook makes of the trajectory is compared with what was sampled.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import tinker
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessage,
    ChatMessageSystem,
    ChatMessageUser,
    execute_tools,
    get_model,
)
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, TaskState
from tests.functions import make_solver
from tests.rl.policies import Words, renderer, tool_call
from tests.rl.tasks import look
from tinker_cookbook.completers import StopCondition, TokensWithLogprobs
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import Env, Metrics, Trajectory, TrajectoryGroup, Transition

from inspect_tinker_plugin.logs import GroupSlot
from inspect_tinker_plugin.rl.dataset import as_rl_dataset
from inspect_tinker_plugin.rl.group import InspectGroupBuilder

ADVANTAGE = 0.5
MOST_CALLS = 14

LINES = [
    "I look at it.",
    "Two\n\nlines,  oddly spaced ",
    tool_call("look", '{"at":"a"}'),
    "First some text.\n\n" + tool_call("look", '{"at": "b"}'),
    tool_call("look", '{"at": "a"}') + "\n" + tool_call("look", '{"at":  "c"}'),
    '<tool_call>\n{"name": "look", "arguments": {"at": oops}}\n</tool_call>',
]


@dataclass(frozen=True)
class Step:
    """What a conversation does next, and the conversations that begin with it."""

    kind: str
    branches: tuple[tuple[Step, ...], ...] = ()
    number: int = 0


def plain(kind: str) -> st.SearchStrategy[Step]:
    return st.builds(Step, st.just(kind), number=st.integers(0, 5))


TURNS = st.one_of(
    *[plain(kind) for kind in ("go on", "go on", "aside", "compact", "edit", "replace")],
    st.builds(Step, st.just("again")),
)
KINDS = st.sampled_from(["fork", "agents"])
PLANS = st.recursive(
    st.lists(TURNS, min_size=1, max_size=5).map(tuple),
    lambda inner: st.lists(
        TURNS | st.builds(Step, KINDS, st.lists(inner, min_size=1, max_size=3).map(tuple)),
        min_size=1,
        max_size=4,
    ).map(tuple),
    max_leaves=4,
)  # fmt: skip


@make_solver
async def player(state: TaskState, generate: Generate, plan: tuple[Step, ...]) -> TaskState:
    calls = itertools.count()

    async def turn(messages: list[ChatMessage]) -> list[ChatMessage]:
        if next(calls) >= MOST_CALLS:
            return []
        output = await get_model().generate(messages, tools=[look()])
        results, _ = await execute_tools([*messages, output.message], [look()])
        return [output.message, *(results or [ChatMessageUser(content="Go on.")])]

    async def converse(messages: list[ChatMessage], steps: Sequence[Step]) -> None:
        for step in steps:
            at = step.number % len(messages)
            if step.kind == "go on":
                messages += await turn(messages)
            elif step.kind == "again":
                await turn(messages)
                messages += await turn(messages)
            elif step.kind == "aside":
                await turn([*messages, ChatMessageUser(content=f"Aside {step.number}?")])
            elif step.kind == "compact":
                messages[1:] = [ChatMessageUser(content=f"So far: {step.number}.")]
            elif step.kind == "edit":
                messages[at].content = f"{messages[at].text} (edited)"
            elif step.kind == "replace":
                messages[at] = messages[at].model_copy(deep=True, update={"id": None})
            elif step.kind == "fork":
                ways = [copy.deepcopy(messages) for _ in step.branches]
                await asyncio.gather(*map(converse, ways, step.branches))
            else:
                asks = [ChatMessageUser(content=f"Agent {len(b) % 2}.") for b in step.branches]
                system = ChatMessageSystem(content="Help.")
                talks: list[list[ChatMessage]] = [[system, ask] for ask in asks]
                await asyncio.gather(*map(converse, talks, step.branches))

    await converse(state.messages, plan)
    state.messages += await turn(state.messages)
    return state


@dataclass
class Marked(Words):
    """Gives each sampled token a different log-probability, by which it is found again."""

    said: dict[float, int] = field(default_factory=dict)

    async def __call__(
        self,
        model_input: tinker.ModelInput,
        stop: StopCondition,
        *,
        max_tokens: int | None = None,
    ) -> TokensWithLogprobs:
        sampled = await super().__call__(model_input, stop, max_tokens=max_tokens)
        marks = [-float(len(self.said) + 1 + index) for index in range(len(sampled.tokens))]
        self.said.update(zip(marks, sampled.tokens, strict=True))
        return replace(sampled, maybe_logprobs=marks)


class InTime(InspectGroupBuilder):
    """Keeps each trajectory as it was before the group computed rewards, paid turn by turn."""

    before: list[Trajectory]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        self.before = []
        for trajectory in trajectory_group:
            for number, transition in enumerate(trajectory.transitions):
                transition.reward += 2.0**-number
            self.before.append(replace(trajectory, transitions=list(trajectory.transitions)))
        return await super().compute_group_rewards(trajectory_group, env_group)


async def play(
    plan: tuple[Step, ...], lines: Sequence[str]
) -> tuple[TrajectoryGroup, Trajectory, Marked]:
    task = Task(
        dataset=[Sample(id=1, input="Do it.", target="x")],
        solver=player(plan),
        scorer=includes(),
    )
    made = as_rl_dataset(task, renderer(), group_size=1).get_batch(0)[0]
    assert isinstance(made, InspectGroupBuilder)
    builder = InTime(made.handle, made.sample, GroupSlot(0, 0, 1))
    policy = Marked(lines)
    group = await do_group_rollout(builder, policy)
    return group, builder.before[0], policy


def tokens_of(transition: Transition) -> list[int]:
    return [*transition.ob.to_ints(), *transition.ac.tokens]


def branches(transitions: Sequence[Transition]) -> list[list[int]]:
    """The branches of a trajectory in time order, by tokens; the longest open one continues."""
    ends: list[list[int]] = []
    for transition in transitions:
        prompt = transition.ob.to_ints()
        begun = [end for end in ends if prompt[: len(end)] == end]
        if begun:
            ends.remove(max(begun, key=len))
        ends.append(tokens_of(transition))
    return ends


def values(datum: tinker.Datum, name: str) -> list[float]:
    return cast(list[float], datum.loss_fn_inputs[name].to_torch().tolist())


def whole(datum: tinker.Datum) -> list[int]:
    return [*datum.model_input.to_ints(), int(values(datum, "target_tokens")[-1])]


def trained(data: Sequence[tinker.Datum]) -> list[tuple[float, int, float]]:
    """Mark, token and advantage of each token in the loss."""
    found = []
    for datum in data:
        names = ("mask", "logprobs", "target_tokens", "advantages")
        for mask, mark, token, advantage in zip(
            *(values(datum, name) for name in names), strict=True
        ):
            assert mask or not advantage
            if mask:
                found.append((mark, int(token), advantage))
    return sorted(found)


def paid(transitions: Sequence[Transition]) -> dict[tuple[float, ...], tuple[float, Any]]:
    """Reward and metrics of each turn, by the marks of its reply."""
    return {tuple(each.ac.logprobs): (each.reward, each.metrics) for each in transitions}


def step(kind: str, *inner: tuple[Step, ...], number: int = 0) -> Step:
    return Step(kind, inner, number)


ON = step("go on")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=PLANS, lines=st.lists(st.sampled_from(LINES), min_size=1, max_size=5))
@example(plan=(ON, ON, ON), lines=LINES)
@example(plan=(ON, step("fork", (ON, ON), (ON, ON)), ON), lines=LINES)
@example(plan=(step("agents", (ON, ON), (ON, ON), (ON,)), ON), lines=LINES[:1])
@example(plan=(ON, ON, step("compact"), ON, ON), lines=LINES)
@example(plan=(ON, step("aside"), ON, step("aside"), ON), lines=LINES[:3])
@example(plan=(ON, step("edit", number=2), ON, ON), lines=LINES[1:])
@example(plan=(ON, step("again"), step("again"), ON), lines=LINES[:1])
def test_each_sampled_token_is_learnt_once_and_paid_as_in_time(
    plan: tuple[Step, ...], lines: list[str]
) -> None:
    group, in_time, policy = asyncio.run(play(plan, lines))
    [arranged] = group.trajectories_G
    data = trajectory_to_data(arranged, ADVANTAGE)
    # a datum for each branch, and nothing but branches
    assert sorted(map(whole, data)) == sorted(branches(in_time.transitions))
    assert arranged.transitions[-1].metrics["tokens/segments"] == len(data)
    # each sampled token once in the loss, with its own log-probability and the same advantage
    in_loss = trained(data)
    assert {mark: token for mark, token, _ in in_loss} == policy.said
    assert len(in_loss) == len(policy.said)
    assert in_loss == trained(trajectory_to_data(in_time, ADVANTAGE))
    # every turn keeps its reward, and the last is still the last
    assert paid(arranged.transitions) == paid(in_time.transitions)
    assert arranged.transitions[-1] is in_time.transitions[-1]
    total = sum(2.0**-number for number in range(len(in_time.transitions)))
    assert group.get_total_rewards() == [pytest.approx(total)]
