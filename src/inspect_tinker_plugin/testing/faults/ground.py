"""The task that a fault campaign runs; every part of it can be struck in a chosen episode."""

from __future__ import annotations

import asyncio
import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessage, GenerateConfig, ModelAPI, ModelOutput, get_model, modelapi
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer
from inspect_ai.solver import Generate, Solver, TaskState, solver, use_tools
from inspect_ai.tool import Tool, ToolChoice, ToolInfo, tool
from inspect_ai.util import ExecResult, SandboxEnvironment, sandbox, sandboxenv

from inspect_tinker_plugin.episode.types import EpisodeResult
from inspect_tinker_plugin.inspect_internals import running_sample_id
from inspect_tinker_plugin.observers import (
    EpisodeEnded,
    EpisodeObserver,
    EpisodeStarted,
    TurnTaken,
)
from inspect_tinker_plugin.rewards import UnscoredError
from inspect_tinker_plugin.testing.faults.plan import Case, Fault, Kind, Point

PROVIDER = "rl_faults"
"""Name of the sandbox provider and of the judge's model provider."""


class Struck(RuntimeError):
    """What a fault raises."""


@dataclass
class Running:
    """A case while it runs: what strikes it, and whom a kill cancels."""

    case: Case
    group: asyncio.Task[Any] | None = None
    struck: set[int] = field(default_factory=set)
    """Epochs whose fault has come."""

    def fault(self, epoch: int) -> Fault | None:
        """The fault of a member; those that a retry makes have none."""
        faults = self.case.faults
        return faults[epoch - 1] if epoch <= len(faults) else None


_running: dict[int, Running] = {}


async def strike(point: Point, sample_id: int | str | None, epoch: int) -> None:
    """Do what the fault of an episode says, when this is its point, once."""
    running = _running.get(int(sample_id or 0))
    fault = None if running is None else running.fault(epoch)
    if running is None or fault is None or fault.point is not point or epoch in running.struck:
        await asyncio.sleep(0)
        return
    running.struck.add(epoch)
    await _strike(fault, running)


async def _strike(fault: Fault, running: Running) -> None:
    match fault.kind:
        case Kind.RAISE:
            raise Struck(str(fault))
        case Kind.HANG:
            await asyncio.Event().wait()
        case Kind.CANCEL:
            raise asyncio.CancelledError
        case Kind.TIMEOUT:
            raise TimeoutError(str(fault))
        case Kind.KILL:
            assert running.group is not None
            running.group.cancel()
            await asyncio.sleep(0)
            if running.case.number % 2:
                running.group.cancel()
            await asyncio.sleep(0)


async def strike_here(point: Point) -> None:
    """Strike the episode that runs in this context."""
    sample_id, epoch = running_sample_id()
    await strike(point, sample_id, epoch)


def clean_reward(number: int) -> float:
    """What an episode of a case earns when nothing goes wrong; never zero."""
    return (number % 97 + 1) / 128


def answer(number: int) -> str:
    """What the policy says in the end."""
    return f"ANSWER {number}."


@solver
def asking() -> Solver:
    """One question, or the tool loop."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        await strike(Point.SOLVER_BEFORE, state.sample_id, state.epoch)
        state = await generate(state)
        await strike(Point.SOLVER_AFTER, state.sample_id, state.epoch)
        return state

    return solve


@tool
def look() -> Tool:
    async def execute() -> str:
        """Look at the word in the sandbox."""
        await strike_here(Point.TOOL)
        return (await sandbox().exec(["cat", "word"])).stdout

    return execute


@scorer(metrics=[mean()])
def graded() -> Scorer:
    """The clean reward for the right answer; no score at all without one, and never a zero."""

    async def score(state: TaskState, target: Target) -> Score:
        await strike(Point.SCORER, state.sample_id, state.epoch)
        verdict = await get_model(role="grader").generate("Is it right?")
        said = state.output.completion if state.output else ""
        if verdict.completion != "yes" or answer(int(state.sample_id)) not in said:
            return Score.unscored()
        return Score(value=clean_reward(int(state.sample_id)))

    return score


@modelapi(name=PROVIDER)
class Judge(ModelAPI):
    """Says yes."""

    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput:
        await strike_here(Point.JUDGE)
        return ModelOutput.from_content(self.model_name, "yes")

    def should_retry(self, ex: BaseException) -> bool:
        return False


@sandboxenv(name=PROVIDER)
class Folder(SandboxEnvironment):
    """A folder, which must not be left behind."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="rl-faults-")

    @classmethod
    async def sample_init(
        cls, task_name: str, config: Any, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        await strike_here(Point.SANDBOX_START)
        return {"default": cls()}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: Any,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for environment in environments.values():
            environment.as_type(Folder).folder.cleanup()
        await strike_here(Point.SANDBOX_RELEASE)

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        if cmd[0] != "cat":  # what Inspect looks for before a solver begins
            return ExecResult(False, 1, "", "")
        await strike_here(Point.SANDBOX_EXEC)
        return ExecResult(True, 0, (Path(self.folder.name) / cmd[1]).read_text(), "")

    async def write_file(self, file: str, contents: str | bytes) -> None:
        await strike_here(Point.SANDBOX_WRITE)
        data = contents.encode() if isinstance(contents, str) else contents
        (Path(self.folder.name) / file).write_bytes(data)

    async def read_file(self, file: str, text: bool = True) -> Any:
        raise FileNotFoundError(file)


class Watching(EpisodeObserver):
    """An observer that can be struck at every event."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int | str | None, int]] = {}

    async def on_episode_start(self, event: EpisodeStarted, /) -> None:
        self._known[event.episode] = (event.sample.id, event.epoch)
        await strike(Point.OBSERVER_START, event.sample.id, event.epoch)

    async def on_turn(self, event: TurnTaken, /) -> None:
        await strike(Point.OBSERVER_TURN, *self._known[event.episode])

    async def on_episode_end(self, event: EpisodeEnded, /) -> None:
        self._known.pop(event.episode, None)
        await strike(Point.OBSERVER_END, event.sample_id, event.epoch)


async def reward(result: EpisodeResult) -> float:
    """The score, which may be struck on its way."""
    await strike(Point.REWARD, result.sample.id, result.epoch)
    scored = result.scores.get("graded")
    value = math.nan if scored is None else float(scored.score.as_float())
    if math.isnan(value):
        raise UnscoredError("there is no answer to score")
    return value


def make_task(agent: bool, cases: int) -> Task:
    """Make the task of a campaign, with a sample per case."""
    samples = [
        Sample(
            id=number,
            input=f"This is case {number}. What is the answer?",
            target=answer(number),
            files={"word": "plum"} if agent else None,
        )
        for number in range(cases)
    ]
    return Task(
        name="agent" if agent else "question",
        dataset=samples,
        solver=[use_tools(look()), asking()] if agent else asking(),
        scorer=graded(),
        sandbox=PROVIDER if agent else None,
        model_roles={"grader": f"{PROVIDER}/judge"},
    )
