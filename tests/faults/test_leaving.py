"""However episodes end, or their process does, nothing of the stock docker provider is left."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, Scorer, Target, accuracy, includes
from inspect_ai.solver import TaskState, generate
from inspect_ai.util import sandbox
from tests.faults.leaving import MOMENTS
from tests.functions import make_scorer
from tests.rl.policies import Words, renderer
from tests.waiting import wait_until
from tinker_cookbook.rl.rollouts import do_group_rollout

from inspect_tinker_plugin.contracts.errors import Cause, EpisodeError
from inspect_tinker_plugin.episode.sandbox import sandbox_places
from inspect_tinker_plugin.rl.dataset import InspectRLDataset, as_rl_dataset

pytestmark = [pytest.mark.docker, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
COMPOSE = """
services:
  default:
    image: inspect-rl-test/python:1
    x-local: true
    init: true
    command: tail -f /dev/null
    labels: {{inspect-rl-test: {label}}}
networks:
  default:
    labels: {{inspect-rl-test: {label}}}
"""


class Stack:
    """A compose file of one test, and what the engine has of it."""

    def __init__(self, folder: Path) -> None:
        self.label = uuid.uuid4().hex
        self.file = folder / "compose.yaml"
        self.file.write_text(COMPOSE.format(label=self.label))

    def left(self) -> list[str]:
        """Containers in any state, and networks."""
        found: list[str] = []
        for command in (["ps", "-aq"], ["network", "ls", "-q"]):
            answer = subprocess.run(
                ["docker", *command, "--filter", f"label=inspect-rl-test={self.label}"],
                capture_output=True,
                text=True,
                check=True,
            )
            found += answer.stdout.split()
        return found

    def dataset(
        self, sample: dict[str, object], *, group_size: int = 1, scored: Scorer | None = None
    ) -> InspectRLDataset:
        task = Task(
            dataset=[Sample.model_validate({"id": 1, "input": "?", "target": "!"} | sample)],
            solver=generate(),
            scorer=scored or includes(),
            sandbox=("docker", str(self.file)),
        )
        return as_rl_dataset(task, renderer(), group_size=group_size, max_sandboxes=6)


@pytest.fixture
def stack(tmp_path: Path) -> Stack:
    return Stack(tmp_path)


@pytest.mark.parametrize(
    "sample",
    [
        pytest.param({"setup": "exit 3"}, id="set-up script fails"),
        pytest.param({"files": {"/proc/nowhere/x": "x"}}, id="file cannot be written"),
        pytest.param({"files": {"elsewhere:x": "x"}}, id="file for no service"),
    ],
)
async def test_a_sandbox_whose_set_up_fails_is_released(
    stack: Stack, sample: dict[str, object]
) -> None:
    with pytest.raises(EpisodeError, match="sandbox"):
        await do_group_rollout(stack.dataset(sample).get_batch(0)[0], Words(["!"]))
    assert stack.left() == []
    assert sandbox_places("docker").alive == 0


@pytest.mark.parametrize(
    "after",
    [0.3, 2.5, *(pytest.param(each, marks=pytest.mark.nightly) for each in (1.0, 4.0, 6.0))],
)
async def test_episodes_cancelled_in_parallel_leave_nothing(stack: Stack, after: float) -> None:
    chance = random.Random(after)
    [builder] = stack.dataset({"setup": "sleep 3"}, group_size=5).get_batch(0)

    async def leave(rollout: asyncio.Task[object]) -> None:
        await asyncio.sleep(after + chance.random())
        rollout.cancel()
        await asyncio.sleep(chance.random() / 10)
        rollout.cancel()

    rollouts = [
        asyncio.create_task(env.initial_observation(), name=f"rollout {i}")
        for i, env in enumerate(await builder.make_envs())
    ]
    await asyncio.gather(*[leave(rollout) for rollout in rollouts])
    await asyncio.wait(rollouts)
    cleaning = asyncio.create_task(builder.cleanup())
    await asyncio.sleep(0.2)
    cleaning.cancel()  # the canceller is cancelled, too
    await asyncio.wait([cleaning])
    assert stack.left() == []
    assert sandbox_places("docker").alive == 0


@make_scorer(accuracy())
async def without_client(state: TaskState, target: Target, patch: pytest.MonkeyPatch) -> Score:
    with patch.context() as here:
        here.setenv("PATH", "/nowhere")
        return Score(value=(await sandbox().exec(["true"])).returncode)


async def test_a_client_of_the_engine_that_is_gone_is_no_fault_of_what_is_inside(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    [builder] = stack.dataset({}, scored=without_client(monkeypatch)).get_batch(0)
    with pytest.raises(EpisodeError, match="'docker'") as caught:
        await do_group_rollout(builder, Words(["!"]))
    assert caught.value.cause is Cause.SANDBOX


def leave(mode: str, stack: Stack) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.faults.leaving", mode, str(stack.file)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.nightly  # a command that is interrupted: tests/cli/test_interrupt.py
@pytest.mark.parametrize(
    "mode", ["interrupt", "return", "raise", "while the engine is asked", "while starting"]
)
def test_leaving_a_process_leaves_no_container(mode: str, stack: Stack) -> None:
    process = leave(mode, stack)
    output, _ = process.communicate(timeout=180)
    assert mode in MOMENTS or "started" in output, output
    assert stack.left() == []


@pytest.mark.nightly
def test_dropping_envs_releases_their_containers(stack: Stack) -> None:
    with leave("drop", stack) as process:
        assert process.stdout is not None
        assert any(line.startswith("started") for line in process.stdout)
        wait_until(lambda: not stack.left())
        assert process.poll() is None
        process.kill()
