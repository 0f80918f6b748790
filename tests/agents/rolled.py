"""One sample by an agent program, on both sides: as a rollout with tokens, and as an eval."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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

from inspect_tinker_plugin.contracts.episodes import TurnRequest
from inspect_tinker_plugin.rl.dataset import as_rl_dataset
from inspect_tinker_plugin.testing import ScriptedPolicy, load_renderer, scripted_model
from inspect_tinker_plugin.tokens.episode import EpisodeTokens

Script = Callable[[TurnRequest], ModelOutput]


@dataclass
class Rolled:
    """What a rollout gave."""

    reward: float
    metrics: dict[str, Any]
    sampled: list[tuple[list[int], list[int]]]
    """Each prompt with its reply, in time, as the sampler saw them."""

    data: list[tinker.Datum]


@dataclass
class Evaluated:
    """What an eval gave."""

    turns: int
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
    requests: list[TurnRequest] = []
    prompt = EpisodeTokens.prompt

    def noted(tokens: EpisodeTokens, request: TurnRequest) -> tinker.ModelInput:
        requests.append(request)
        return prompt(tokens, request)

    policy: Any = Sampler(script, lambda: requests[-1])
    dataset = as_rl_dataset(task, load_renderer(), batch_size=1, group_size=1, limit=1, **options)
    (builder,) = dataset.get_batch(0)
    with monkeypatch.context() as patch:
        patch.setattr(EpisodeTokens, "prompt", noted)
        group = await do_group_rollout(builder, policy)
    (trajectory,) = group.trajectories_G
    (reward,) = group.get_total_rewards()
    return Rolled(
        reward,
        dict(trajectory.transitions[-1].metrics) | dict(group.metrics_G[0]),
        policy.sampled,
        trajectory_to_data(trajectory, 1.0),
    )


async def evaluated(task: Task, script: Script, folder: Path) -> Evaluated:
    """Run the first sample in an eval, from the log that it wrote."""
    turns: list[TurnRequest] = []

    def counted(request: TurnRequest) -> ModelOutput:
        turns.append(request)
        return script(request)

    (log,) = await inspect_ai.eval_async(
        task,
        model=scripted_model(counted),
        limit=1,
        log_dir=str(folder),
        fail_on_error=False,
    )
    assert log.samples, log.error
    (sample,) = log.samples
    return Evaluated(len(turns), sample)
