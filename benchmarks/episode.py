"""CPU of a one-turn episode, beside the same sample through ``inspect_ai.eval``.

Four sides alternate in one process: ``eval_async`` without sample logs, once with all samples
in one eval and once with eight an eval (where its own start counts), this package (groups of
eight, rendering and parsing included), and a hand-written cookbook env that knows nothing of
Inspect. Prints medians and ratios; the bar is ours <= 0.5 x the cheaper eval.
Run ``python benchmarks/episode.py [alternations]``.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable

os.environ.setdefault("INSPECT_DISPLAY", "none")

import tinker
from inspect_ai import Task, eval_async
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.renderers import get_renderer, get_text_content
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import ActionExtra, Env, EnvGroupBuilder, StepResult
from tinker_cookbook.tokenizer_utils import get_tokenizer

from inspect_tinker_plugin.rl.dataset import as_rl_dataset
from inspect_tinker_plugin.testing import scripted_model, tokenizer_path

GROUPS, GROUP_SIZE = 8, 8
SAMPLES = GROUPS * GROUP_SIZE
LIMIT = 0.5
QUESTION = "Natalia sold clips to 48 friends in April and half as many in May. " * 6
ANSWER = "In April she sold 48 and in May 24, which makes 72 together.\nANSWER: 72"

TOKENIZER = get_tokenizer(str(tokenizer_path()))
RENDERER = get_renderer("qwen3_instruct", TOKENIZER)


def task(samples: int) -> Task:
    dataset = [Sample(id=i, input=f"{i}: {QUESTION}", target="72") for i in range(samples)]
    return Task(dataset=dataset, solver=generate(), scorer=match())


class Policy(TokenCompleter):
    """Says the answer without thinking about it."""

    tokens = TOKENIZER.encode(ANSWER + "<|im_end|>", add_special_tokens=False)

    async def __call__(
        self,
        model_input: tinker.ModelInput,
        stop: StopCondition,
        *,
        max_tokens: int | None = None,
    ) -> TokensWithLogprobs:
        return TokensWithLogprobs(tokens=list(self.tokens), maybe_logprobs=[0.0] * len(self.tokens))


class HandWritten(Env):
    """What a cookbook user would write for this one task."""

    async def initial_observation(self) -> tuple[tinker.ModelInput, StopCondition]:
        prompt = RENDERER.build_generation_prompt([{"role": "user", "content": QUESTION}])
        return prompt, RENDERER.get_stop_sequences()

    async def step(self, action: list[int], *, extra: ActionExtra | None = None) -> StepResult:
        message, _ = RENDERER.parse_response(action)
        right = get_text_content(message).strip().endswith("72")
        return StepResult(float(right), True, tinker.ModelInput.empty(), [])


class HandWrittenGroup(EnvGroupBuilder):
    async def make_envs(self) -> list[HandWritten]:
        return [HandWritten() for _ in range(GROUP_SIZE)]


async def through_eval(samples: int = SAMPLES) -> None:
    [log] = await eval_async(
        task(samples),
        model=scripted_model(lambda request: ANSWER, keep_requests=False),
        log_samples=False,
        log_realtime=False,
        log_dir=tempfile.mkdtemp(),
    )
    assert log.status == "success", log.error


async def through_small_evals() -> None:
    for _ in range(GROUPS):
        await through_eval(GROUP_SIZE)


async def through_us() -> None:
    dataset = as_rl_dataset(task(GROUPS), RENDERER, batch_size=GROUPS, group_size=GROUP_SIZE)
    groups = [do_group_rollout(builder, Policy()) for builder in dataset.get_batch(0)]
    for group in await asyncio.gather(*groups):
        assert group.get_total_rewards() == [1.0] * GROUP_SIZE


async def by_hand() -> None:
    groups = [do_group_rollout(HandWrittenGroup(), Policy()) for _ in range(GROUPS)]
    for group in await asyncio.gather(*groups):
        assert group.get_total_rewards() == [1.0] * GROUP_SIZE


async def cpu_ms(side: Callable[[], Awaitable[None]]) -> float:
    started = time.process_time()
    await side()
    return (time.process_time() - started) / SAMPLES * 1000


async def main(alternations: int) -> bool:
    sides = {
        "inspect eval": through_eval,
        "eval of 8": through_small_evals,
        "this package": through_us,
        "by hand": by_hand,
    }
    figures: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        await cpu_ms(side)
    for _ in range(alternations):
        for name, side in sides.items():
            figures[name].append(await cpu_ms(side))
    medians = {name: statistics.median(values) for name, values in figures.items()}
    for name, value in medians.items():
        print(f"{name:14} {value:6.2f} ms CPU per episode")
    ratio = medians["this package"] / medians["inspect eval"]
    print(f"ours / eval    {ratio:6.2f}  (at most {LIMIT})")
    print(f"ours / eval of 8 {medians['this package'] / medians['eval of 8']:4.2f}")
    print(f"ours / by hand {medians['this package'] / medians['by hand']:6.2f}")
    return ratio <= LIMIT


if __name__ == "__main__":
    ok = asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 7))
    sys.exit(0 if ok else 1)
