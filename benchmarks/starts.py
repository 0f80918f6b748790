"""How long the event loop stands still while many episodes start at once.

The longest CPU time between two turns of the loop, while all rollouts start and wait for a policy.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Sequence

import tinker
from benchmarks import sides
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import EnvGroupBuilder

import inspect_tinker_plugin
from inspect_tinker_plugin.rl.dataset import as_rl_dataset


class Patient(TokenCompleter):
    """Answers when everybody has asked."""

    def __init__(self, count: int) -> None:
        self._left = count
        self.everybody = asyncio.Event()
        self._go_on = asyncio.Event()

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        self._left -= 1
        if not self._left:
            self.everybody.set()
        await self._go_on.wait()
        reply = sides.encode_reply(sides.ANSWER)
        return TokensWithLogprobs(tokens=reply, maybe_logprobs=[0.0] * len(reply))


async def _longest_pause(groups: Sequence[EnvGroupBuilder], count: int) -> float:
    policy = Patient(count)
    pauses: list[float] = []

    async def beat() -> None:
        since = time.thread_time()
        while not policy.everybody.is_set():
            await asyncio.sleep(0)
            now = time.thread_time()
            pauses.append(now - since)
            since = now

    freeze = getattr(inspect_tinker_plugin, "freeze_memory", gc.collect)
    freeze()
    beating = asyncio.create_task(beat())
    rollouts = [asyncio.create_task(do_group_rollout(group, policy)) for group in groups]
    await beating
    for rollout in rollouts:
        rollout.cancel()
    await asyncio.gather(*rollouts, return_exceptions=True)
    return max(pauses) * 1000


async def ours(count: int) -> float:
    samples = count // sides.GROUP
    dataset = as_rl_dataset(
        sides.one_turn_task(samples + 1), sides.RENDERER, batch_size=samples, group_size=sides.GROUP
    )
    groups = dataset.get_batch(0)
    [warm, *_] = await groups[0].make_envs()  # what happens once per process is another line
    await warm.initial_observation()
    await groups[0].cleanup()
    return await _longest_pause(groups, samples * sides.GROUP)


async def by_hand(count: int) -> float:
    samples = count // sides.GROUP
    groups = [sides.Builder(lambda: sides.HandWritten(sides.RENDERER)) for _ in range(samples)]
    return await _longest_pause(groups, samples * sides.GROUP)
