"""The prompt of a sample: runs its solver up to the first model call, and makes a row of that.

It runs without a sandbox if possible.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import SandboxEnvironment, sandboxenv

from inspect_tinker_plugin.contracts.episodes import EpisodeResult, TurnRequest
from inspect_tinker_plugin.contracts.errors import ExportError
from inspect_tinker_plugin.episode.runner import EpisodeRunner
from inspect_tinker_plugin.export.conversations import (
    message_row,
    require_text,
    to_text,
    tools_json,
)
from inspect_tinker_plugin.options import DatasetOptions

PROBE = "inspect_rl_probe"


@dataclass
class _Watch:
    """What one episode did before its first model call."""

    state: TaskState | None = None
    asked_for_sandbox: bool = False


# An episode runs in its own task, which starts with a copy of this context.
_watch: ContextVar[_Watch] = ContextVar("inspect_rl_first_turn")


@dataclass(frozen=True)
class FirstTurn:
    """The first model call of a sample."""

    request: TurnRequest
    state: TaskState
    """The solver's state at that moment."""


class FirstTurns:
    """Finds the first model call of each sample of a task.

    A sample with a sandbox is first tried with a stand-in, without its files and set-up
    script. Only when the solver uses the sandbox, or fails, is it run again with the
    real one: most agents first use theirs in a tool call, which comes later.
    """

    def __init__(self, task: Task, options: DatasetOptions | None = None) -> None:
        options = replace(options or DatasetOptions(), max_turns=None)
        task = _add_observer(task)
        self._real = EpisodeRunner(
            task,
            options=options,
            solver=options.solver,
            sandbox=options.sandbox,
            first_calls=True,
        )
        bare = copy.copy(task)
        bare.sandbox = (
            None  # or Inspect would warn that the stand-in does not use its configuration
        )
        self._probe = EpisodeRunner(
            bare, options=options, solver=options.solver, sandbox=PROBE, first_calls=True
        )

    async def of(self, sample: Sample) -> FirstTurn:
        """Run a sample up to its first model call."""
        if self._real.sandbox is None and sample.sandbox is None:
            return await self._run(self._real, sample, _Watch())
        watch = _Watch()
        try:
            bare = sample.model_copy(update={"sandbox": None, "files": None, "setup": None})
            turn = await self._run(self._probe, bare, watch)
            if not watch.asked_for_sandbox:
                return turn
        except ExportError:
            pass
        return await self._run(self._real, sample, _Watch())

    async def _run(self, runner: EpisodeRunner, sample: Sample, watch: _Watch) -> FirstTurn:
        episode = runner.episode(sample)
        token = _watch.set(watch)
        try:
            outcome = await episode.start()
        finally:
            _watch.reset(token)
            await episode.close()
        if isinstance(outcome, EpisodeResult):
            raise ExportError(_why(outcome))
        assert watch.state is not None
        return FirstTurn(outcome, watch.state)


def _why(result: EpisodeResult) -> str:
    if result.error is not None:
        cause = result.error.__cause__ or result.error
        return f"[{result.error.cause}] {type(cause).__name__}: {_one_line(cause)}"
    if result.limit is not None:
        return f"a {result.limit.type} limit ended it before the first model call."
    return "its solver ended without asking the model, so there is no prompt."


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _add_observer(task: Task) -> Task:
    """Put the observer in front of everything that the task's episodes run."""
    setup = task.setup if isinstance(task.setup, Sequence) else [task.setup]
    observed = copy.copy(task)
    observed.setup = [_observe(), *(each for each in setup if each is not None)]
    return observed


@solver(name="inspect_rl_observe")
def _observe() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        _watch.get().state = state
        return state

    return solve


def row_of(task: str, sample: Sample, request: TurnRequest, state: TaskState) -> dict[str, Any]:
    """Make the row of a sample.

    Args:
        task: Name of the task.
        sample: The sample, with its id.
        request: The first model call of its episode.
        state: The state of the episode at that moment; it holds the order of choices that
            the solver shuffled.
    """
    row: dict[str, Any] = {
        "id": str(sample.id),
        "prompt": [message_row(message) for message in request.messages],
        "answer": _answer(sample, state),
        "info": _info(sample),
        "task": task,
        "tools": tools_json(request.tools),
    }
    require_text(row)
    return row


def _answer(sample: Sample, state: TaskState) -> str:
    """Return the target as one string: itself, or a JSON list when there are several."""
    targets = [sample.target] if isinstance(sample.target, str) else list(sample.target)
    if sample.choices:
        targets = _shuffled_letters(targets, [c.original_position for c in state.choices])
    return targets[0] if len(targets) == 1 else to_text(targets) if targets else ""


def _shuffled_letters(targets: Sequence[str], positions: Sequence[int]) -> list[str]:
    """Rename choice letters when the solver shows the choices in another order.

    Args:
        targets: Letters of the sample's own order; anything else is left alone.
        positions: For each shown choice, its position in the sample.
    """
    if list(positions) == sorted(positions):
        return list(targets)
    shown = {chr(ord("A") + old): chr(ord("A") + new) for new, old in enumerate(positions)}
    return ["".join(shown.get(letter, letter) for letter in target) for target in targets]


def _info(sample: Sample) -> str:
    return to_text(
        {
            "sample_id": sample.id,
            "target": sample.target,
            "choices": sample.choices,
            "metadata": sample.metadata or {},
            "files": sorted(sample.files) if sample.files else [],
            "sandbox": sample.sandbox,
        }
    )


@sandboxenv(name=PROBE)
class ProbeSandbox(SandboxEnvironment):
    """Stands in for a sandbox until the first model call; a solver that uses it is run again."""

    @classmethod
    async def sample_init(
        cls, task_name: str, config: Any, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """Make the stand-in; nothing is started."""
        return {"default": ProbeSandbox()}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: Any,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """Do nothing: there is nothing to release."""

    async def exec(self, *args: Any, **kwargs: Any) -> Any:
        """Record the use and refuse it."""
        watch = _watch.get()
        # Inspect itself tries a command before the solver starts.
        watch.asked_for_sandbox |= watch.state is not None
        raise RuntimeError("the sandbox is not started yet")

    write_file = read_file = connection = exec
