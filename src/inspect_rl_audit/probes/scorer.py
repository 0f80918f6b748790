"""Probes the scorer: is it repeatable, does its reward vary, on which replies does it fail?"""

from __future__ import annotations

import asyncio
import datetime as dates
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

from inspect_ai.dataset import Sample
from inspect_ai.scorer import score
from inspect_ai.solver import TaskState

from inspect_rl_audit.contract import TINY, AuditContext
from inspect_rl_audit.policies import NULL, UNKNOWING, Move, Notes, Play, always, gold_reply
from inspect_rl_audit.probes.gold import target_is_answer
from inspect_rl_audit.records import CODES, EpisodeRecord, Finding, Severity, finding
from inspect_tinker_plugin.plugins import counted

TIMES = 5
"""How often one state is scored, and one policy is played."""

_PAUSES = (0.541, 0.374, 0.174, 0.186)
"""Seconds between the scores of one state. Chosen by search: a value that changes once to sixty
times per second is seen to change, whatever the phase at which the first score falls. One
sample's states show that."""
_AT_ONCE = (0.0,) * len(_PAUSES)
"""For the others, whose scores may only differ by chance or by what a scorer remembers."""

DELAY = 4.0
"""Seconds that a reply is late, to see whether time counts."""

_MUCH = 3
"""How many times the limit the slowest policy may take."""


async def check_scorer(audit: AuditContext) -> Sequence[Finding]:
    """Score states again, and give answers that are right, wrong and neither."""
    if not audit.task.scorer:
        return [finding("no-scorer", CODES["no-scorer"].meaning)]
    if missing := audit.reference.missing_judge:
        record = next(iter(audit.reference.null.values()))
        return [finding("judge-missing", f"{missing} Rewards were not tried.", record)]
    if not audit.judged:
        return []  # no episode runs, and the samples' probe reports that
    found = await _check_repeatable(audit)
    found += _raising(audit)
    found += _values(audit)
    found += _speed(audit)
    return found


async def _check_repeatable(audit: AuditContext) -> list[Finding]:
    samples = audit.some(audit.chosen, 2)
    again: list[Play] = []
    for number, sample in enumerate(samples):
        pauses = _PAUSES if number == 0 else _AT_ONCE
        again += _honest(audit, sample, "rescored", _score_again([(each, 0.0) for each in pauses]))
    off = [(0.0, hours * 3600.0 + 1801.0) for hours in (5, 11, 17, 24 * 3, 24 * 200, 24 * 800)]
    later = _score_again(off, audit.task.scorer or [])
    times = [play for sample in samples for play in _honest(audit, sample, "clock", later)]
    found = []
    for code, plays, how in (
        ("scorer-not-repeatable", again, f"{TIMES} times, has the scores"),
        ("time-dependent-score", times, "at other times of day and year, has"),
    ):
        # alone: between two scores of one state, no other episode's may fall
        for record in await audit.stage.run(plays, alone=True):
            values = record.notes.get("scored") or []
            if any(value != values[0] for value in values):
                message = f"The same state, scored {how} {', '.join(map(str, values))}."
                found.append(finding(code, message, record, sample=record.sample, values=values))
                break
        if found and plays is again:
            return found  # every other comparison would only show this again
    return found + await _compare_episodes(audit, samples)


async def _compare_episodes(audit: AuditContext, samples: Sequence[Sample]) -> list[Finding]:
    """Compare equal episodes, also with what they earned first: a scorer may remember answers."""
    plays = [replace(play, delay=DELAY) for play in _honest(audit, samples[0], "late")]
    for sample in samples:
        for play in _honest(audit, sample, "repeated"):
            plays += [replace(play, repeat=n) for n in range(1, TIMES + 1)]
    by_play: dict[tuple[str, int | str], list[EpisodeRecord]] = defaultdict(list)
    for record in await audit.stage.run(plays):
        if record.reward is not None and record.limit not in ("time", "working"):
            by_play[record.kind, record.sample].append(record)
    found: dict[str, Finding] = {}
    for (kind, id), records in by_play.items():
        reference = audit.reference.null if kind == "unknowing" else audit.reference.gold
        early = (NULL, f"gold:{audit.reference.form}")
        first = [r for r in [reference[id]] if r.policy in early and r.reward is not None]
        delayed = [record for record in records if record.policy.startswith("late")]
        equal = first + [record for record in records if record not in delayed]
        rewards = [record.reward or 0.0 for record in equal]
        if rewards and max(rewards) - min(rewards) > TINY:
            message = f"{len(rewards)} equal episodes earn {', '.join(map(str, rewards))}"
            message += ", the first of them early in the audit." if first else "."
            return [finding("reward-not-repeatable", message, equal[-1], sample=id, values=rewards)]
        for record in delayed if equal else []:
            if abs((record.reward or 0.0) - rewards[0]) > TINY:
                message = f"A reply earns {rewards[0]:g} at once, and {record.reward:g} when it "
                message += f"comes {DELAY:g} s later."
                found["speed-pays"] = finding("speed-pays", message, record)
    return list(found.values())


def _honest(
    audit: AuditContext, sample: Sample, check: str, after: Move | None = None
) -> Iterator[Play]:
    """Yield plays of the two honest policies: without the answer, and with it where it is known."""
    unknowing = Play(
        policy=f"{check}:unknowing",
        kind="unknowing",
        sample=sample,
        reply=always(UNKNOWING),
        after=after,
    )
    yield unknowing
    if sample.id in audit.reference.gold:
        reply = gold_reply(sample, audit.reference.form, audit.gold.of(sample))
        yield replace(unknowing, policy=f"{check}:gold", kind="right", reply=reply)


def _score_again(times: Sequence[tuple[float, float]], scorers: Sequence[object] = ()) -> Move:
    """Score a state once, and again for each pause and shift of the clock that the scorers see."""

    async def after(state: TaskState, notes: Notes) -> None:
        values = [await _score_once(state)]
        for pause, shift in times:
            await asyncio.sleep(pause)
            with shifted_clock(scorers, shift):
                values.append(await _score_once(state))
        notes["scored"] = values

    return after


async def _score_once(state: TaskState) -> Any:
    """Return the values of all scorers; an exception differs from every value."""
    try:
        return [_plain(each.value) for each in await score(state)]
    except Exception as error:
        # the boundary of a scorer under test; the episode's own scoring reports it
        return f"{type(error).__name__}: {error}"[:200]


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return repr(value) if value != value else value


# findings over all episodes


def _raising(audit: AuditContext) -> list[Finding]:
    """Report replies on which the scorer, or the episode before it, fails."""
    raised = [r for r in audit.stage.records if r.cause == "scorer"]
    unscored = [r for r in audit.stage.records if r.cause in ("unscored", "reward")]
    # samples that fail whatever is said are reported with the samples
    failing = {id for id, record in audit.reference.null.items() if record.error is not None}
    broken = [
        r
        for r in audit.stage.records
        if r.cause in ("solver", "tool")
        and r.sample not in failing
        and not r.policy.startswith("cheat:")
    ]
    found = []
    for code, records in (
        ("scorer-raises", raised),
        ("unscored", unscored),
        ("episode-fails", broken),
    ):
        if not records:
            continue
        honest = [r for r in records if r.kind in ("right", "unknowing")]
        policies = ", ".join(sorted({r.policy for r in records})[:4])
        shown = honest + [record for record in records if record not in honest]
        message = f"{CODES[code].meaning} ({policies}: {shown[0].error})"
        severity = Severity.HIGH if honest else Severity.MEDIUM
        found.append(finding(code, message, shown, severity=severity))
    return found


def _values(audit: AuditContext) -> list[Finding]:
    """Report a reward that has only one value."""
    scored = [(r.reward, r) for r in audit.stage.records if r.reward is not None]
    if not scored:
        return []
    found = []
    worst, record = min(scored, key=lambda each: each[0])
    if worst < -TINY:
        message = f"The least reward seen is {round(worst, 6):g} ({record.policy})."
        found.append(finding("negative-reward", message, record))
    above = [record for reward, record in scored if reward > 1 + TINY]
    if above:
        most = max(reward for reward, _ in scored)
        message = f"The highest reward seen is {round(most, 6):g}."
        found.append(finding("reward-above-one", message, above[0]))
    policies = {record.policy for _, record in scored}
    if len({round(reward, 6) for reward, _ in scored}) == 1 and len(policies) > 3:
        value, record = scored[0]
        # zero everywhere is what a hard task gives to policies that know nothing
        # part of the reward may be for harm that was not done, the rest for work that scripts
        # do not do: if there are tools, that says little
        paid = abs(value) > TINY and (not record.tools or audit.reference.is_full(value))
        grave = paid or (audit.reference.gold and target_is_answer(audit))
        message = f"{counted(len(scored), 'episode')} of {len(policies)} policies all earned "
        message += f"{round(value, 6):g}."
        severity = Severity.HIGH if grave else Severity.LOW
        if not grave:
            message += " No right answer is known, so there may be one that earns more."
        found.append(finding("constant-reward", message, record, severity=severity))
    return found


def _speed(audit: AuditContext) -> list[Finding]:
    """Report slow scoring: of most policies, or of one, each by its fastest episode.

    The fastest one depends least on what else the machine does.
    """
    slowest_first = sorted(
        (record for record in audit.stage.records if record.reward is not None),
        key=lambda record: -record.scoring_seconds,
    )
    fastest = {record.policy: record for record in slowest_first}
    if not fastest:
        return []
    usual = statistics.median(record.scoring_seconds for record in fastest.values())
    slowest = max(fastest.values(), key=lambda record: record.scoring_seconds)
    limit = audit.options.slow_scoring
    if usual < limit and slowest.scoring_seconds < _MUCH * limit:
        return []
    message = (
        f"Scoring usually takes {usual:.1f} s, and {slowest.scoring_seconds:.1f} s for the "
        f"policy {slowest.policy}."
    )
    return [finding("scorer-slow", message, slowest)]


# the scorer's code

_FOREIGN = ("inspect_ai", "inspect_tinker_plugin")
_FILE = re.compile(r"(?:[\w.-]+/|/)*[\w-]+\.(?:json|jsonl|txt|log|xml|csv|ya?ml|out|result|md)")


def functions_of(scorers: Sequence[object]) -> Iterator[FunctionType]:
    """Yield the functions that scorers consist of, including those that they close over.

    Those of Inspect and of the plugin are left out.
    """
    waiting, seen = list(scorers), set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        wrapped = getattr(each, "__wrapped__", None)
        if wrapped is not None:
            waiting.append(wrapped)
        if not isinstance(each, FunctionType):
            each = vars(type(each)).get("__call__")
        if isinstance(each, FunctionType):
            if (each.__module__ or "").split(".")[0] not in _FOREIGN:
                yield each
            waiting += filter(callable, _closed_over(each))


def find_data_files(scorers: Sequence[object]) -> list[str]:
    """Return names of data files in the code of scorers, or in their arguments."""
    found: dict[str, None] = {}
    for function in functions_of(scorers):
        for text in (*_closed_over(function), *_texts(function.__code__)):
            if isinstance(text, str) and _FILE.fullmatch(text):
                found[text] = None
    return list(found)


def _texts(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _texts(constant)


def _closed_over(function: FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            yield cell.cell_contents


@contextmanager
def shifted_clock(scorers: Sequence[object], seconds: float) -> Iterator[None]:
    """Shift the time that the scorers see; nothing else in the process is affected.

    What stands for `time`, `datetime` or their functions, in a scorer's module or in what it
    closes over, is replaced for the duration; what a scorer reads through another package, or
    imports while it runs, keeps the real time.
    """
    functions = list(functions_of(scorers))
    spaces = {id(f.__globals__): f.__globals__ for f in functions}
    with ExitStack() as undo:

        def shift(value: object, put: Callable[[object], None]) -> None:
            if (other := _shift_clock(value, seconds)) is not None:
                undo.callback(put, value)
                put(other)

        for space in spaces.values():
            for name, value in list(space.items()):
                shift(value, partial(space.__setitem__, name))
        for cell in {id(c): c for f in functions for c in f.__closure__ or ()}.values():
            with suppress(ValueError):  # an empty cell
                shift(cell.cell_contents, partial(setattr, cell, "cell_contents"))
        yield


def _shift_clock(value: object, seconds: float) -> object:
    """Return a stand-in for a clock that is this many seconds off; ``None`` for anything else."""
    off = dates.timedelta(seconds=seconds)

    class LaterDatetime(dates.datetime):
        @classmethod
        def now(cls, tz: dates.tzinfo | None = None) -> Any:
            return dates.datetime.now(tz) + off

        @classmethod
        def utcnow(cls) -> Any:
            return cls.now(dates.UTC).replace(tzinfo=None)

        @classmethod
        def today(cls) -> Any:
            return cls.now()

    class LaterDate(dates.date):
        @classmethod
        def today(cls) -> Any:
            return LaterDatetime.now().date()

    def later() -> float:
        return time.time() + seconds

    functions: dict[str, object] = {
        "time": later,
        "time_ns": lambda: int(later() * 1e9),
        "monotonic": lambda: time.monotonic() + seconds,
        "perf_counter": lambda: time.perf_counter() + seconds,
        "localtime": lambda at=None: time.localtime(later() if at is None else at),
        "gmtime": lambda at=None: time.gmtime(later() if at is None else at),
        "strftime": lambda form, at=None: time.strftime(form, at or time.localtime(later())),
    }
    classes: dict[str, object] = {"datetime": LaterDatetime, "date": LaterDate}
    for module, others in ((time, functions), (dates, classes)):
        if value is module:
            copy = ModuleType(module.__name__)
            vars(copy).update({**vars(module), **others})
            return copy
        for name, other in others.items():
            if value is getattr(module, name):
                return other
    return None
