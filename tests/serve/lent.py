"""Samplers that a caller may lend, with scripted words and real tokens."""

from __future__ import annotations

from typing import Any

import tinker
from inspect_ai import Task
from tests.rl.policies import renderer
from tinker_cookbook.completers import TokenCompleter

from inspect_tinker_plugin.serve import Prompt, RolloutResult, RolloutService, Sampled, Sampler


async def own(task: Task, policy: TokenCompleter, **options: Any) -> RolloutResult:
    """Roll out the first sample in this process, as clients shall get it."""
    service = RolloutService(task, renderer(), **options)
    return await service.run_episode(0, lend(policy))


def lend(policy: TokenCompleter, *, version: int | None = None) -> Sampler:
    """Lend a policy of the cookbook: the same replies as in a training with it."""

    async def sample(prompt: Prompt) -> Sampled:
        reply = await policy(
            tinker.ModelInput.from_ints(list(prompt.tokens)),
            list(prompt.stop),  # type: ignore[arg-type]  # strings or tokens
            max_tokens=prompt.max_tokens,
        )
        return Sampled(
            tokens=reply.tokens,
            logprobs=reply.logprobs,
            stop_reason=reply.stop_reason,
            policy_version=version,
        )

    return sample
