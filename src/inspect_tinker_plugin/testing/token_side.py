"""Runs one sample as a cookbook rollout: rendered prompts in, sampled tokens out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from inspect_tinker_plugin.episode.runner import Episode
from inspect_tinker_plugin.episode.types import EpisodeResult, TurnRequest
from inspect_tinker_plugin.errors import EpisodeError
from inspect_tinker_plugin.options import EpisodeOptions
from inspect_tinker_plugin.scripted.model import recording
from inspect_tinker_plugin.scripted.policy import ScriptedPolicy
from inspect_tinker_plugin.scripted.replies import Player, Script, ScriptExhausted
from inspect_tinker_plugin.scripted.tokenizer import load_renderer
from inspect_tinker_plugin.testing.record import Trace, trace_of_result
from inspect_tinker_plugin.testing.sides import (
    NO_OVERRIDES,
    TIMEOUT,
    Overrides,
    TaskSource,
    bounded,
    make_runner,
    one_sample_task,
)

if TYPE_CHECKING:
    from inspect_ai.dataset import Sample
    from tinker_cookbook.renderers import Renderer


async def run_rollout_side(
    source: TaskSource,
    script: Script,
    *,
    sample: int | Sample = 0,
    options: EpisodeOptions | None = None,
    ordered: bool = True,
    renderer: Renderer | None = None,
    overrides: Overrides = NO_OVERRIDES,
    timeout: float | None = TIMEOUT,
) -> Trace:
    """Run one sample through the env and the cookbook's rollout runner, with the script in tokens.

    No log is kept, as in most training: the fast paths that this allows are compared with.

    Args:
        source: The task.
        script: What the policy says.
        sample: The sample, or its position in the task's dataset.
        options: How the episode is run.
        ordered: Whether the model calls come in a fixed order.
        renderer: The renderer; Qwen3's over the shipped tokenizer by default.
        overrides: What replaces parts of the task.
        timeout: Seconds that it may take.

    Raises:
        ParityError: The episode did not end.
    """
    renderer = renderer or load_renderer()
    with recording() as others:
        task = one_sample_task(source, sample)
        runner = make_runner(task, options, overrides, keep_log=False)
        player = Player(script)
        episode = runner.episode(task.dataset[0])
        work = _roll(episode, player, renderer)
        result = await bounded(work, player, timeout=timeout)
        return trace_of_result(
            result, policy=player, others=others, ordered=ordered, events=episode.events
        )


async def _roll(episode: Episode, player: Player, renderer: Renderer) -> EpisodeResult:
    from tinker_cookbook.completers import TokenCompleter
    from tinker_cookbook.rl.rollout_runner import run_rollout

    from inspect_tinker_plugin.error_policy import ErrorPolicy
    from inspect_tinker_plugin.rewards import Reward
    from inspect_tinker_plugin.rl.ending import RewardRules
    from inspect_tinker_plugin.rl.env import InspectEnv
    from inspect_tinker_plugin.tokens.episode import DatasetRenderer, EpisodeTokens

    class RecordingTokens(EpisodeTokens):
        """Records each request as it is rendered, before the solver changes it."""

        def prompt(self, request: TurnRequest) -> Any:
            seen = [message.model_copy(deep=True) for message in request.messages]
            player.requests.append(replace(request, messages=seen))
            return super().prompt(request)

    async def no_reward(result: EpisodeResult) -> Reward:
        return Reward(0.0, {})

    policy = ScriptedPolicy(renderer, player.script, request=lambda: player.requests[-1])
    tokens = RecordingTokens(
        DatasetRenderer(renderer), task=episode.prepared.name, sample_id=episode.sample.id
    )
    outcomes = RewardRules(no_reward, ErrorPolicy.of("raise"))
    env = InspectEnv(episode, tokens, outcomes)
    try:
        await run_rollout(cast(TokenCompleter, policy), env)
    except EpisodeError:
        if env.ending is None:
            raise
    except ScriptExhausted:
        # the part so far can still be compared; the report says that the script ran out
        await env.settle()
    finally:
        player.exhausted = policy.exhausted
        await env.close()
    assert env.ending is not None
    return env.ending.result
