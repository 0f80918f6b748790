"""Parity cases: a task, a script, and what a run must show for the case to be meaningful."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from inspect_ai import Task

from inspect_tinker_plugin.options import EpisodeOptions
from inspect_tinker_plugin.testing import Script
from inspect_tinker_plugin.testing.kit import RUN_SIDE, ParityReport, Side, compare_runs
from inspect_tinker_plugin.testing.sides import Conditions, run_eval
from inspect_tinker_plugin.testing.traces import Trace, differences


@dataclass(frozen=True, kw_only=True)
class Expect:
    """What a run under ``inspect_ai.eval`` must show.

    Two sides that both fail to start agree perfectly. Each case therefore states what it is
    meant to exercise, and a run that does not show it is a fault of the case.
    """

    turns: int
    """Model calls of the policy."""
    scores: Mapping[str, Any] = field(default_factory=dict)
    """Values of scores by name; all scores."""
    limit: str | None = None
    """Type of the limit that ended the sample."""
    error: str | None = None
    """Type of the exception that ended the sample."""
    says: Sequence[str] = ()
    """Texts that occur somewhere in what the model saw, or in the final messages."""
    tools: Sequence[str] | None = None
    """Names of the tools that the first call offered."""
    store: Mapping[str, Any] = field(default_factory=dict)
    """Entries that the store has."""
    other_turns: Mapping[str, int] = field(default_factory=dict)
    """Calls of other scripted models by name."""
    holds: Callable[[Trace], bool] | None = None
    """Anything else."""

    def faults(self, trace: Trace) -> list[str]:
        """Return what the run did not show; empty when the case served its purpose."""
        told = _Faults()
        told.equal("turns", len(trace.requests), self.turns)
        told.equal(
            "scores",
            {name: score.get("value") for name, score in trace.scores.items()},
            self.scores,
        )
        told.equal("limit", trace.limit and trace.limit["type"], self.limit)
        told.equal("error", trace.error and trace.error["type"], self.error)
        if self.tools is not None and trace.requests:
            offered = [tool["name"] for tool in trace.requests[0]["tools"]]
            told.equal("tools", sorted(offered), sorted(self.tools))
        seen = repr((trace.requests, trace.messages, trace.tool_events))
        for text in self.says:
            told.equal(f"{text!r} in the conversation", repr(text)[1:-1] in seen, True)
        for key, value in self.store.items():
            told.equal(f"store[{key!r}]", trace.store.get(key), value)
        turns = {name: len(requests) for name, requests in trace.other_models.items()}
        told.equal("calls of other models", turns, dict(self.other_turns))
        if self.holds is not None:
            told.equal("holds()", self.holds(trace), True)
        return [*trace.script_faults, *told.faults]


@dataclass
class _Faults:
    faults: list[str] = field(default_factory=list)

    def equal(self, what: str, found: Any, wanted: Any) -> None:
        if list(differences(found, wanted)):
            self.faults.append(f"{what}: expected {wanted!r}, found {found!r}")


@dataclass(frozen=True, kw_only=True)
class ParityCase:
    """One task that both sides run with one script."""

    id: str
    theme: str
    """The module that holds the case."""
    task: Callable[[], Task]
    script: Script
    expect: Expect
    options: EpisodeOptions = field(default_factory=EpisodeOptions)
    ordered: bool = True
    """Whether the model calls come in a fixed order (not so for parallel sub-agents)."""
    docker: bool = False
    """Whether the case needs a Docker engine."""
    renderer: str = "qwen3_instruct"
    """The renderer when the case is played through tokens."""
    tokens: str | None = None
    """Why the case cannot be played through tokens, or ``None`` when it can."""

    @property
    def how(self) -> Conditions:
        """How it is run."""
        return Conditions(options=self.options, ordered=self.ordered, renderer=self.renderer)


async def eval_trace(case: ParityCase) -> Trace:
    """Return the trace of a case under ``inspect_ai.eval``."""
    return await run_eval(case.task, case.script, case.how)


async def check_case(case: ParityCase, *, side: Side, expected: Trace) -> ParityReport:
    """Run one case as an episode, and compare it with its trace under ``inspect_ai.eval``."""
    found = await RUN_SIDE[side](case.task, case.script, case.how)
    report = compare_runs(expected, found, side=side)
    return replace(report, sample_id=case.id, faults=case.expect.faults(expected))


def case(
    id: str | None = None, **fields: Any
) -> Callable[[Callable[[], Task]], Callable[[], Task]]:
    """Register a function that makes a task as a case.

    Args:
        id: The case's id; by default the function's name.
        fields: The other fields of the case.
    """

    def register(task: Callable[[], Task]) -> Callable[[], Task]:
        module = task.__module__.rsplit(".", 1)[-1]
        name = id or task.__name__.replace("_", "-")
        _registered.append(ParityCase(id=name, theme=module, task=task, **fields))
        return task

    return register


_registered: list[ParityCase] = []


def load_corpus(folder: str | Path) -> list[ParityCase]:
    """Import every module of a folder and return the cases that they register.

    Raises:
        ValueError: Two cases have one id, or the folder registers none.
    """
    folder = Path(folder).resolve()
    _registered.clear()
    for path in sorted(folder.glob("*.py")):
        if path.name.startswith("_"):
            continue
        name = f"parity_corpus.{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    ids = [each.id for each in _registered]
    twice = sorted({each for each in ids if ids.count(each) > 1})
    if twice:
        raise ValueError(f"cases with one id: {', '.join(twice)}")
    if not ids:
        raise ValueError(f"{folder} holds no parity cases")
    return list(_registered)
