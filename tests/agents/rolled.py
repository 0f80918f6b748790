"""One sample by an agent program, on both sides: as a rollout with tokens, and as an eval."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import inspect_ai
import pytest
import tinker
from inspect_ai import Task
from inspect_ai.log import EvalSample
from inspect_ai.model import ModelOutput
from inspect_ai.scorer import value_to_float
from tinker_cookbook.completers import StopCondition, TokensWithLogprobs
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import Transition

from inspect_tinker_plugin.contracts.episodes import TurnRequest
from inspect_tinker_plugin.rl.dataset import as_rl_dataset
from inspect_tinker_plugin.testing import ScriptedPolicy, load_renderer, scripted_model
from inspect_tinker_plugin.tokens.episode import EpisodeTokens

Script = Callable[[TurnRequest], ModelOutput]


@dataclass
class Clock:
    """A script, and when it was asked what."""

    script: Script
    requests: list[TurnRequest] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def __call__(self, request: TurnRequest) -> ModelOutput:
        seen = [message.model_copy(deep=True) for message in request.messages]
        self.requests.append(replace(request, messages=seen))
        self.times.append(time.monotonic())
        return self.script(self.requests[-1])

    @property
    def start(self) -> float:
        """Seconds until the program asked for the first time."""
        return self.times[0] - self.started

    @property
    def per_turn(self) -> float:
        """Seconds from one question to the next, on average."""
        return (self.times[-1] - self.times[0]) / max(1, len(self.times) - 1)


@dataclass
class Rolled:
    """What a rollout gave."""

    clock: Clock
    reward: float
    metrics: dict[str, Any]
    transitions: list[Transition]
    """In the order of the trajectory."""

    sampled: list[tuple[list[int], list[int]]]
    """Each prompt with its reply, in time, as the sampler saw them."""

    data: list[tinker.Datum]

    @property
    def tokens(self) -> int:
        """Tokens that are trained over."""
        return sum(datum.model_input.length + 1 for datum in self.data)


@dataclass
class Evaluated:
    """What an eval gave."""

    clock: Clock
    sample: EvalSample

    @property
    def reward(self) -> float:
        (score,) = (self.sample.scores or {}).values()
        return value_to_float()(score.value)


class Sampler(ScriptedPolicy):
    """Keeps what the sampler was asked and said."""

    def __init__(self, script: Script, request: Callable[[], TurnRequest]) -> None:
        super().__init__(load_renderer(), script, request=request)
        self.sampled: list[tuple[list[int], list[int]]] = []

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        said = await super().__call__(model_input, stop, max_tokens=max_tokens)
        self.sampled.append((model_input.to_ints(), list(said.tokens)))
        return said


async def rolled(
    task: Task, script: Script, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> Rolled:
    """Roll the first sample out in a group of one, by the cookbook."""
    clock = Clock(script)
    requests: list[TurnRequest] = []
    prompt = EpisodeTokens.prompt

    def noted(tokens: EpisodeTokens, request: TurnRequest) -> tinker.ModelInput:
        requests.append(request)
        return prompt(tokens, request)

    policy: Any = Sampler(clock, lambda: requests[-1])
    dataset = as_rl_dataset(task, load_renderer(), batch_size=1, group_size=1, limit=1, **options)
    (builder,) = dataset.get_batch(0)
    with monkeypatch.context() as patch:
        patch.setattr(EpisodeTokens, "prompt", noted)
        clock.started = time.monotonic()
        group = await do_group_rollout(builder, policy)
    (trajectory,) = group.trajectories_G
    (reward,) = group.get_total_rewards()
    return Rolled(
        clock,
        reward,
        dict(trajectory.transitions[-1].metrics) | dict(group.metrics_G[0]),
        trajectory.transitions,
        policy.sampled,
        trajectory_to_data(trajectory, 1.0),
    )


async def evaluated(task: Task, script: Script, folder: Path) -> Evaluated:
    """Run the first sample in an eval, from the log that it wrote."""
    clock = Clock(script)
    (log,) = await inspect_ai.eval_async(
        task,
        model=scripted_model(clock),
        limit=1,
        log_dir=str(folder),
        fail_on_error=False,
    )
    assert log.samples, log.error
    (sample,) = log.samples
    return Evaluated(clock, sample)
