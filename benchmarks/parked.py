"""Memory of a thousand episodes parked at once in one process; all of them finish.

Each side runs in a separate process: this package, ``inspect_ai.eval`` with as many
connections, and hand-written envs. The growth of the resident set between "nothing" and
"all parked" is printed; the bar is 55 MB for ours.
Run ``python -m benchmarks.parked [episodes]``.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("INSPECT_DISPLAY", "none")

LIMIT_MB = 55.0
ANSWER = "72"


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _setup() -> tuple[object, object]:
    from inspect_ai import Task
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import match
    from inspect_ai.solver import generate

    def task(count: int) -> Task:
        samples = [Sample(id=i, input=f"{i}: what is 70+2?", target=ANSWER) for i in range(count)]
        return Task(dataset=samples, solver=generate(), scorer=match())

    return task, ANSWER


async def package(count: int) -> float:
    from inspect_ai import Task
    from tinker_cookbook.renderers import get_renderer
    from tinker_cookbook.rl.types import StepResult
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    from inspect_tinker_plugin.rl.dataset import as_rl_dataset
    from inspect_tinker_plugin.testing import tokenizer_path

    make, _ = _setup()
    assert callable(make)
    tokenizer = get_tokenizer(str(tokenizer_path()))
    renderer = get_renderer("qwen3_instruct", tokenizer)
    reply = tokenizer.encode(f"{ANSWER}<|im_end|>", add_special_tokens=False)
    task = make(count)
    assert isinstance(task, Task)
    groups = as_rl_dataset(task, renderer, batch_size=count).get_batch(0)
    [warm] = await groups[0].make_envs()
    await warm.initial_observation()
    await warm.step(list(reply))
    before = resident_mb()
    envs = [env for group in groups for env in await group.make_envs()]
    await asyncio.gather(*[env.initial_observation() for env in envs])
    parked = resident_mb()
    results: list[StepResult] = await asyncio.gather(*[env.step(list(reply)) for env in envs])
    assert [result.reward for result in results] == [1.0] * count
    return parked - before


async def evaluation(count: int) -> float:
    from inspect_ai import Task, eval_async
    from inspect_ai.model import (
        ChatMessage,
        GenerateConfig,
        ModelAPI,
        ModelOutput,
        get_model,
        modelapi,
    )
    from inspect_ai.tool import ToolChoice, ToolInfo

    from inspect_tinker_plugin.testing import scripted_model

    make, _ = _setup()
    assert callable(make)
    everyone = asyncio.Event()
    waiting = 0
    peak = 0.0

    @modelapi(name="parking")
    class Parking(ModelAPI):
        async def generate(
            self,
            input: list[ChatMessage],
            tools: list[ToolInfo],
            tool_choice: ToolChoice,
            config: GenerateConfig,
        ) -> ModelOutput:
            nonlocal waiting, peak
            waiting += 1
            if waiting == count:
                peak = resident_mb()
                everyone.set()
            await everyone.wait()
            return ModelOutput.from_content("parking", ANSWER)

    task = make(count)
    assert isinstance(task, Task)
    warm = make(1)
    assert isinstance(warm, Task)
    await eval_async(warm, model=scripted_model([ANSWER]), log_dir=tempfile.mkdtemp())
    before = resident_mb()
    [log] = await eval_async(
        task,
        model=get_model("parking/model", memoize=False),
        max_connections=count,
        limit=count,
        log_samples=False,
        log_realtime=False,
        log_dir=tempfile.mkdtemp(),
    )
    assert log.status == "success"
    return peak - before


async def by_hand(count: int) -> float:
    from benchmarks import sides

    envs = [sides.HandWritten(sides.RENDERER) for _ in range(count + 1)]
    await envs.pop().initial_observation()
    before = resident_mb()
    kept = await asyncio.gather(*[env.initial_observation() for env in envs])
    assert len(kept) == count
    return resident_mb() - before


SIDES = {"this package": package, "inspect eval": evaluation, "by hand": by_hand}


def main(count: int) -> bool:
    figures = {}
    for name in SIDES:
        out = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.parked", "--side", name, str(count)],
            cwd=Path(__file__).parents[1],
            check=True,
            capture_output=True,
            text=True,
        )
        figures[name] = float(out.stdout.split()[-1])
        print(f"{name:14} {figures[name]:7.1f} MB for {count} parked episodes")
    print(f"bar: under {LIMIT_MB:.0f} MB for this package")
    return figures["this package"] < LIMIT_MB


if __name__ == "__main__":
    if "--side" in sys.argv:
        print(asyncio.run(SIDES[sys.argv[2]](int(sys.argv[3]))))
    else:
        sys.exit(0 if main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000) else 1)
