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
from pathlib import Path
from typing import Any, TypeVar

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog, EvalSample, write_eval_log
from inspect_ai.scorer import Score
from inspect_ai.solver import Generate, Solver, TaskState, chain, solver

from inspect_rl_audit.policies import Actor, Move, Notes, Play
from inspect_rl_audit.records import AuditJournal, EpisodeRecord
from inspect_tinker_plugin import (
    Cause,
    ConfigError,
    Episode,
    EpisodeResult,
    EpisodeRunner,
    InspectRLError,
)
from inspect_tinker_plugin.logs import eval_spec
from inspect_tinker_plugin.options import EpisodeOptions
from inspect_tinker_plugin.rewards import AggregatorError, Reward, UnscoredError

T = TypeVar("T")


LOGS = "logs"
"""Folder of the ``.eval`` logs, below the audit's."""


MOST_SECONDS = 180.0
"""Seconds after which an episode of a scripted policy is given up."""

_LOG_SIZE = 64
"""Episodes per log; at most this many are lost when the process is killed."""


@dataclass
class Budget:
    """How much an audit may do in one run."""

    episodes: int | None = None
    """Episodes to run."""

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


class Stage:
    """Runs the probes' episodes.

    Args:
        task: The task, with the scorers that plugins add.
        runner_options: Keyword arguments of every `EpisodeRunner` (sandbox, solver).
        options: How episodes are run.
        reward: Turns a result into a reward.
        journal: Episodes that were run before.
        folder: The audit's folder.
        budget: How much may be run.
        parallel: Episodes at once.
        progress: Called with the number of episodes planned, and after each with ``None``.
    """

    def __init__(
        self,
        task: Task,
        *,
        runner_options: dict[str, Any],
        options: EpisodeOptions,
        reward: Callable[[EpisodeResult], Awaitable[Reward]],
        journal: AuditJournal,
        folder: Path,
        budget: Budget,
        parallel: int,
        progress: Callable[[int | None], object],
    ) -> None:
        self._task = task
        self._options = options
        self._runner_options = runner_options
        self._reward = reward
        self.journal = journal
        self._folder = folder
        self.budget = budget
        self._parallel = parallel
        self._progress = progress
        self._plain = self._runner()

    @property
    def records(self) -> list[EpisodeRecord]:
        """Every episode so far, including those of earlier runs."""
        return list(self.journal.records.values())

    async def sandbox_of(self, sample: Sample) -> str | None:
        """Type of the sandbox that a sample runs in, ``None`` without one."""
        spec = await self._plain.sandbox_of(sample)
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
        self._progress(len(new))
        for start in range(0, len(new), _LOG_SIZE):
            await self._run_block(new[start : start + _LOG_SIZE], 1 if alone else self._parallel)
        return [known[play.key] for play in plays if play.key in known]

    async def _run_block(self, plays: Sequence[Play], parallel: int) -> None:
        places = asyncio.Semaphore(parallel)
        done: list[tuple[EpisodeRecord, EvalSample | None]] = []

        async def one(play: Play) -> None:
            async with places:
                if self.budget.take():
                    done.append(await self._episode(play))
                self._progress(None)

        try:
            async with asyncio.TaskGroup() as group:
                for play in plays:
                    group.create_task(one(play))
        finally:  # keep what was done before an interruption, too
            if done:
                self._keep(done)

    def _keep(self, done: list[tuple[EpisodeRecord, EvalSample | None]]) -> None:
        name = f"{LOGS}/{datetime.now(UTC):%Y-%m-%dT%H-%M-%S}_{_plain(self._task.name)}_"
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
            self._write(samples, self._folder / name)
        self.journal.add(records)

    def _write(self, samples: list[EvalSample], path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        spec = eval_spec(
            self._plain,
            run_id=uuid.uuid4().hex[:22],
            group_size=1,
            metadata={},
            model="scripted",
        )
        spec.dataset.sample_ids = list(dict.fromkeys(sample.id for sample in samples))
        log = EvalLog(status="success", eval=spec, samples=samples)
        # In a thread: inside a running event loop, Inspect's log functions would patch asyncio.
        with ThreadPoolExecutor(1, thread_name_prefix="audit-log") as thread:
            thread.submit(write_eval_log, log, str(path), format="eval").result()

    def _runner(self, solver: Solver | None = None) -> EpisodeRunner:
        given = {**self._runner_options, **({"solver": solver} if solver is not None else {})}
        return EpisodeRunner(self._task, options=self._options, keep_log=True, **given)

    async def _episode(self, play: Play) -> tuple[EpisodeRecord, EvalSample | None]:
        notes: Notes = {}
        runner = self._plain
        if play.before is not None or play.after is not None:
            inner = self._runner_options.get("solver") or self._task.solver
            runner = self._runner(with_moves(inner, play.before, play.after, notes))
        started = time.perf_counter()
        actor = Actor(play, notes)
        episode = runner.episode(play.sample)
        result: EpisodeResult | None = None
        error: str | None = None
        cause = Cause.SOLVER
        try:
            async with asyncio.timeout(MOST_SECONDS) as scope:
                result = await _act(episode, actor, play.delay)
        except TimeoutError:
            if not scope.expired():
                raise
            error = f"it did not end within {MOST_SECONDS:g} s"
        except InspectRLError as problem:
            error = str(problem)
        finally:
            await episode.close()
        seconds = time.perf_counter() - started
        reward: float | None = None
        if result is not None and result.error is not None:
            error, cause = _text(result.error), result.error.cause
        elif result is not None:
            try:
                reward = (await self._reward(result)).value
            except UnscoredError as problem:
                error, cause = _text(problem), Cause.UNSCORED
            except AggregatorError as problem:
                error, cause = _text(problem), Cause.REWARD
        sample = None
        if result is not None and result.build_log is not None:
            sample = _label(result.build_log(), play, reward, notes)
            notes.update(_scorer_traces(sample))
        metrics = {} if result is None else result.metrics
        limit = None if result is None or actor.gave_up else result.limit
        assert play.sample.id is not None
        record = EpisodeRecord(
            policy=play.policy,
            kind=play.kind,
            sample=play.sample.id,
            repeat=play.repeat,
            reward=reward,
            scores={} if result is None else result.score_values(),
            error=error,
            cause=None if error is None else str(cause),
            limit=None if limit is None else str(limit.type),
            turns=actor.turns,
            tools=actor.tools,
            input_tokens=actor.usage.input_tokens,
            output_tokens=actor.usage.output_tokens,
            seconds=round(seconds, 4),
            scoring_seconds=round(float(metrics.get("time/scoring_s", 0.0)), 4),
            notes=notes,
        )
        return record, sample


async def _act(episode: Episode, actor: Actor, delay: float) -> EpisodeResult:
    outcome = await episode.start()
    while not isinstance(outcome, EpisodeResult):
        await asyncio.sleep(delay)
        output = actor.answer(outcome)
        if output is None:
            return await episode.stop("the scripted policy has nothing more to say")
        outcome = await episode.reply(output)
    return outcome


def with_moves(inner: Solver, before: Move | None, after: Move | None, notes: Notes) -> Solver:
    """Return the task's own solver, with an attacker's moves around it."""
    own = chain(inner)

    @solver(name="audited")
    def audited() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            if before is not None:
                await before(state, notes)
            state = await own(state, generate)
            if after is not None:
                await after(state, notes)
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
    traces: list[dict[str, Any]] = []
    judges: dict[str, None] = {}
    for event in sample.events:
        if event.event == "span_begin" and event.type in ("scorers", "scorer"):
            begun = True
        if begun and event.event == "sandbox":
            traces.append(
                {"action": event.action, "file": event.file, "cmd": event.cmd, "ok": event.result}
            )
        if begun and event.event == "model":
            judges[event.model] = None
    found = {"scorer_did": traces[:50], "judges": list(judges)}
    return {name: value for name, value in found.items() if value}


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


def spread(samples: Sequence[T], count: int) -> list[T]:
    """Return this many samples, spread evenly over the dataset, including the first."""
    if len(samples) <= count:
        return list(samples)
    return [samples[n * len(samples) // count] for n in range(count)]
