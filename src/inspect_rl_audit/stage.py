"""Runs the episodes of an audit: in parallel, within the budget, each logged and run only once."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalSample, write_eval_log
from inspect_ai.model import ModelOutput, ModelUsage
from inspect_ai.scorer import Score
from inspect_ai.solver import Generate, Solver, TaskState, chain, solver

from inspect_rl_audit.policies import Notes, Play, shown
from inspect_rl_audit.records import AuditJournal, EpisodeRecord
from inspect_tinker_plugin import (
    Cause,
    ConfigError,
    Episode,
    EpisodeResult,
    EpisodeRunner,
    InspectRLError,
    TurnRequest,
)
from inspect_tinker_plugin.logs import make_header
from inspect_tinker_plugin.options import DatasetOptions
from inspect_tinker_plugin.rewards import AggregatorError, Reward, UnscoredError

T = TypeVar("T")

LOGS = "logs"
"""Folder of the ``.eval`` logs, below the audit's."""

MOST_SECONDS = 180.0
"""Seconds after which an episode of a scripted policy is given up."""

_MOST_TURNS = 16
"""Model calls after which a scripted policy gives up."""

_PROMPT = 100_000
"""Characters of the first prompt that are kept."""

_LOG_SIZE = 64
"""Episodes per log; at most this many are lost when the process is killed."""


@dataclass
class Budget:
    """How much an audit may do in one run."""

    episodes: int | None = None
    seconds: float | None = None
    """Seconds after which no further episode is started."""

    used: int = 0
    """Episodes run so far, without those of earlier runs."""

    started: float = field(default_factory=time.monotonic)
    refused: int = 0
    """Episodes that were not run for lack of budget."""

    def take(self) -> bool:
        """Take one episode out of the budget, if one is left."""
        spent = self.seconds is not None and time.monotonic() - self.started > self.seconds
        if spent or (self.episodes is not None and self.used >= self.episodes):
            self.refused += 1
            return False
        self.used += 1
        return True


def read_budget(parts: Sequence[str]) -> Budget:
    """Read the values of ``--budget``.

    Raises:
        ConfigError: It is neither a number of episodes nor a time.
    """
    budget = Budget()
    for part in parts:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|minutes?|h)?", part.strip())
        if match is None or float(match[1]) <= 0:
            raise ConfigError(
                f"a budget is a number of episodes (200) or a time (90s, 10m, 1h), not {part!r}"
            )
        number, unit = float(match[1]), match[2]
        if unit is None:
            budget.episodes = int(number)
        else:
            budget.seconds = number * {"s": 1, "m": 60, "h": 3600}[unit[0]]
    return budget


@dataclass(kw_only=True)
class Stage:
    """Runs the probes' episodes."""

    task: Task
    """The task, with the scorers that plugins add."""

    dataset: DatasetOptions
    """How episodes are run."""

    reward: Callable[[EpisodeResult], Awaitable[Reward]]
    """Turns a result into a reward."""

    journal: AuditJournal
    """Episodes that were run before."""

    folder: Path
    """The audit's folder."""

    budget: Budget

    parallel: int
    """Episodes at once."""

    progress: Callable[..., object]
    """Called with the episodes that are done and planned, and ``what=`` the probe."""

    probe: str = "honest policies"
    """What runs now."""

    _planned: int = 0
    _done: int = 0

    @property
    def records(self) -> list[EpisodeRecord]:
        """Every episode so far, including those of earlier runs."""
        return list(self.journal.records.values())

    @cached_property
    def runner(self) -> EpisodeRunner:
        """Runs the task's own solver."""
        return self._runner()

    def _runner(self, solver: Solver | None = None) -> EpisodeRunner:
        return EpisodeRunner(
            self.task,
            options=self.dataset,
            solver=solver or self.dataset.solver,
            sandbox=self.dataset.sandbox,
            keep_log=True,
        )

    async def sandbox_of(self, sample: Sample) -> str | None:
        """Type of the sandbox that a sample runs in, ``None`` without one."""
        spec = await self.runner.sandbox_of(sample)
        return None if spec is None else spec.type

    async def run(self, plays: Sequence[Play], *, alone: bool = False) -> list[EpisodeRecord]:
        """Run episodes, or take them from the journal.

        Args:
            plays: What to play.
            alone: One at a time, with nothing else running.

        Returns:
            A record for each play but those that the budget did not allow.
        """
        known = self.journal.records
        new = [play for play in plays if play.key not in known]
        self._planned += len(new)
        self._show_progress()
        for start in range(0, len(new), _LOG_SIZE):
            await self._run_block(new[start : start + _LOG_SIZE], 1 if alone else self.parallel)
        return [known[play.key] for play in plays if play.key in known]

    def _show_progress(self) -> None:
        self.progress(self._done, self._planned, what=self.probe)

    async def _run_block(self, plays: Sequence[Play], parallel: int) -> None:
        places = asyncio.Semaphore(parallel)
        done: list[tuple[EpisodeRecord, EvalSample | None]] = []

        async def one(play: Play) -> None:
            async with places:
                if self.budget.take():
                    done.append(await self._episode(play))
                self._done += 1
                self._show_progress()

        try:
            async with asyncio.TaskGroup() as group:
                for play in plays:
                    group.create_task(one(play))
        finally:  # keep what was done before an interruption, too
            if done:
                self._keep(done)

    def _keep(self, done: list[tuple[EpisodeRecord, EvalSample | None]]) -> None:
        """Write episodes into a log, then into the journal."""
        name = f"{LOGS}/{datetime.now(UTC):%Y-%m-%dT%H-%M-%S}_{_plain(self.task.name)}_"
        name += f"{_plain(done[0][0].policy)}_{uuid.uuid4().hex[:10]}.eval"
        epochs: Counter[str] = Counter()
        records, samples = [], []
        for record, sample in done:
            if sample is not None:
                epochs[str(record.sample)] += 1
                sample.epoch = epochs[str(record.sample)]
                samples.append(sample)
                record = replace(record, log=name, epoch=sample.epoch)
            records.append(record)
        if samples:
            run = uuid.uuid4().hex[:22]
            log = make_header(self.runner, run_id=run, group_size=1, metadata={}, model="scripted")
            log.eval.dataset.sample_ids = list(dict.fromkeys(sample.id for sample in samples))
            log.status, log.samples = "success", samples
            path = self.folder / name
            path.parent.mkdir(exist_ok=True)
            # In a thread: inside a running event loop, Inspect's log functions would patch asyncio.
            with ThreadPoolExecutor(1, thread_name_prefix="audit-log") as thread:
                thread.submit(write_eval_log, log, str(path), format="eval").result()
        self.journal.add(records)

    async def _episode(self, play: Play) -> tuple[EpisodeRecord, EvalSample | None]:
        actor = _Actor(play)
        notes = actor.notes
        runner = self.runner
        if play.before is not None or play.after is not None:
            runner = self._runner(_acting(self.dataset.solver or self.task.solver, play, notes))
        started = time.perf_counter()
        episode = runner.episode(play.sample)
        result: EpisodeResult | None = None
        reward: float | None = None
        error: str | None = None
        cause = Cause.SOLVER
        try:
            async with asyncio.timeout(MOST_SECONDS) as scope:
                result = await actor.act_in(episode)
        except TimeoutError:
            if not scope.expired():
                raise
            error = f"it did not end within {MOST_SECONDS:g} s"
        except InspectRLError as problem:
            error = str(problem)
        finally:
            await episode.close()
        seconds = time.perf_counter() - started
        assert play.sample.id is not None
        record = EpisodeRecord(
            policy=play.policy,
            kind=play.kind,
            sample=play.sample.id,
            repeat=play.repeat,
            turns=actor.turns,
            seconds=round(seconds, 4),
            notes=notes,
        )
        if result is None:
            return replace(record, error=error, cause=str(cause)), None
        if result.error is not None:
            error, cause = _text(result.error), result.error.cause
        else:
            try:
                reward = (await self.reward(result)).value
            except UnscoredError as problem:
                error, cause = _text(problem), Cause.UNSCORED
            except AggregatorError as problem:
                error, cause = _text(problem), Cause.REWARD
        sample = None
        if result.build_log is not None:
            sample = _label(result.build_log(), play, reward, notes)
            notes.update(_scorer_traces(sample))
        limit = None if actor.gave_up else result.limit
        record = replace(
            record,
            reward=reward,
            scores=result.score_values(),
            error=error,
            cause=None if error is None else str(cause),
            limit=None if limit is None else str(limit.type),
            scoring_seconds=round(float(result.metrics.get("time/scoring_s", 0.0)), 4),
        )
        return record, sample


class _Actor:
    """Plays one policy in one episode."""

    def __init__(self, play: Play) -> None:
        self._play = play
        self.notes: Notes = {}
        self.turns = 0
        self.gave_up = False

    async def act_in(self, episode: Episode) -> EpisodeResult:
        outcome = await episode.start()
        while not isinstance(outcome, EpisodeResult):
            await asyncio.sleep(self._play.delay)
            output = self._answer(outcome)
            if output is None:
                self.gave_up = True
                return await episode.stop("the scripted policy has nothing more to say")
            outcome = await episode.reply(output)
        return outcome

    def _answer(self, request: TurnRequest) -> ModelOutput | None:
        if self.turns == 0:
            tools = [tool.model_dump(mode="json", exclude_none=True) for tool in request.tools]
            self.notes.update(prompt=shown(request)[:_PROMPT], tools=tools)
        output = None
        if self.turns < _MOST_TURNS:
            output = self._play.reply(request, self.notes)
        if output is None:
            return None
        for number, call in enumerate(output.message.tool_calls or []):
            call.id = f"audit_{self.turns}_{number}"
        read = sum(len(message.text) for message in request.messages) // 4 + 1
        written = len(output.completion) // 4 + 1
        output.usage = ModelUsage(
            input_tokens=read, output_tokens=written, total_tokens=read + written
        )
        self.turns += 1
        return output


def _acting(inner: Any, play: Play, notes: Notes) -> Solver:
    """Return the task's own solver, with an attacker's moves around it."""
    own = chain(inner)

    @solver(name="audited")
    def audited() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            if play.before is not None:
                await play.before(state, notes)
            state = await own(state, generate)
            if play.after is not None:
                await play.after(state, notes)
            return state

        return solve

    return audited()


def _text(error: BaseException) -> str:
    return " ".join(str(error).split())[:600] or type(error).__name__


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", text.rpartition("/")[2]).strip("-")[:40] or "task"


def _label(sample: EvalSample, play: Play, reward: float | None, notes: Notes) -> EvalSample:
    """Add the policy, the reward and the notes to Inspect's own record."""
    kept = {name: value for name, value in notes.items() if name not in ("prompt", "tools")}
    sample.metadata = {
        **sample.metadata,
        "audit": {"policy": play.policy, "repeat": play.repeat, "reward": reward, **kept},
    }
    if reward is not None and "reward" not in (sample.scores or {}):
        sample.scores = {**(sample.scores or {}), "reward": Score(value=reward)}
    return sample


def _scorer_traces(sample: EvalSample) -> Notes:
    """Return what the scorers did: files read and written, commands run, models asked."""
    begun = False
    did: list[dict[str, Any]] = []
    judges: dict[str, None] = {}
    for event in sample.events:
        if event.event == "span_begin" and event.type in ("scorers", "scorer"):
            begun = True
        elif begun and event.event == "sandbox":
            did.append(
                {"action": event.action, "file": event.file, "cmd": event.cmd, "ok": event.result}
            )
        elif begun and event.event == "model":
            judges[event.model] = None
    found = {"scorer_did": did[:50], "judges": list(judges)}
    return {name: value for name, value in found.items() if value}


def spread(samples: Sequence[T], count: int) -> list[T]:
    """Return this many samples, spread evenly over the dataset, including the first."""
    if len(samples) <= count:
        return list(samples)
    return [samples[n * len(samples) // count] for n in range(count)]
