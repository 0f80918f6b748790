"""What an audit keeps: its episodes, in a journal, and its findings."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from inspect_tinker_plugin import ConfigError
from inspect_tinker_plugin.plugins import part_of
from inspect_tinker_plugin.processes import Journal
from inspect_tinker_plugin.tasks import describe_part
from inspect_tinker_plugin.train import EpisodeCost

JOURNAL = "journal.jsonl"
"""Episodes of an unfinished audit; the next run continues with it."""

FINISHED = "episodes.jsonl"
"""Episodes of a finished audit."""

PolicyKind = Literal["unknowing", "right", "reworded", "other"]
"""What a policy does: it says that it has no answer, gives the right one, gives it in unusual words
or in another of its forms, or does anything else. What that earns is a reward for nothing."""


Key = tuple[str, int | str, int]
"""Policy, sample and repeat: what an episode is known by within its audit."""


class Shown:
    """An episode that shows a finding: of a scripted policy, or of a real model."""

    sample: int | str

    def evidence(self, **more: Any) -> dict[str, Any]:
        """Return the part of a finding that says where to look."""
        names = ("log", "sample", "epoch", "policy", "reward", "error")
        given = {name: getattr(self, name, None) for name in names}
        return {name: value for name, value in given.items() if value is not None} | more


@dataclass(frozen=True, kw_only=True)
class EpisodeRecord(Shown):
    """One episode of a scripted policy, as probes read it; plain data."""

    policy: str
    kind: PolicyKind = "other"

    sample: int | str
    """Id of the sample."""

    repeat: int = 1
    """Number of this episode among identical ones, from 1."""

    reward: float | None = None
    """The reward; ``None`` when the episode failed or was not scored."""

    scores: Mapping[str, Any] = field(default_factory=dict)
    """Score values by scorer."""

    error: str | None = None
    """What failed."""

    cause: str | None = None
    """The cause of the error, as in ``Cause``."""

    limit: str | None = None
    """The task's limit that ended it."""

    turns: int = 0
    """Model calls that were answered."""

    seconds: float = 0.0
    """Seconds from start to end."""

    scoring_seconds: float = 0.0
    """Of these, seconds in the scorers."""

    notes: Mapping[str, Any] = field(default_factory=dict)
    """Notes of the policy and its moves: the first prompt and its tools, what was found, …"""

    log: str | None = None
    """The ``.eval`` file that holds the episode, below the audit's folder."""

    epoch: int = 1
    """Its epoch in that file."""

    @property
    def key(self) -> Key:
        """Key of this episode within its audit."""
        return self.policy, self.sample, self.repeat

    @property
    def prompt(self) -> str:
        """What the model read at the first call."""
        return str(self.notes.get("prompt", ""))

    @property
    def tools(self) -> tuple[str, ...]:
        """Names of the tools offered at the first call."""
        return tuple(tool["name"] for tool in self.notes.get("tools", []))

    @property
    def output(self) -> str:
        """What an attacker's script printed."""
        return str(self.notes.get("output", ""))


@dataclass(frozen=True, kw_only=True)
class ModelAttempt(Shown):
    """One episode of a real model."""

    sample: int | str
    group: str
    """Log and sample: attempts with the same group are compared with each other."""
    reward: float | None
    stop: str
    cost: EpisodeCost
    failed: bool
    log: str
    epoch: int
    cut: bool = False
    """Whether it was stopped before its end, since sampling failed or its group was given up."""


class AuditJournal:
    """The finished episodes of an audit, one per line; the first line identifies the audit.

    Args:
        folder: Folder of the audit; it is created.
        identity: What is audited and how; another audit's journal is not continued.

    Raises:
        ConfigError: The folder holds another audit, or cannot be written.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self._journal = Journal(folder / JOURNAL)
        identity = json.loads(json.dumps(identity, default=str))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lines = self._journal.load()
            if not lines:
                self._journal.replace([{"audit": identity}])
        except OSError as error:
            raise ConfigError(f"the audit's folder {folder} cannot be written: {error}") from error
        known = lines[0].get("audit", {}) if lines else identity
        names = dict.fromkeys([*identity, *known])
        if differing := [name for name in names if known.get(name) != identity.get(name)]:
            raise ConfigError(
                f"{folder} holds another audit (it differs in {', '.join(differing)}): give "
                "another folder with --out, or start again with --overwrite"
            )
        records = [EpisodeRecord(**fields) for fields in lines[1:]]
        self.records = {record.key: record for record in records}

    def add(self, records: Sequence[EpisodeRecord]) -> None:
        """Record episodes whose log is on disk."""
        self._journal.write(*map(asdict, records))
        self.records.update({record.key: record for record in records})

    def finish(self) -> None:
        """Record that nothing is left to do: the next audit in this folder starts again."""
        os.replace(self._journal.path, self._journal.path.with_name(FINISHED))


def name_value(value: object) -> str:
    """Return a text for an option's value that is the same in the next process."""
    text = str(describe_part(value) if callable(value) else value)
    return re.sub(r" at 0x[0-9a-f]+", "", text)


# findings


class Severity(StrEnum):
    """The severity of a finding, the worst first."""

    HIGH = "high"
    """Training on this task teaches the wrong thing, or nothing."""
    MEDIUM = "medium"
    """Part of the reward is wrong, or is wrong for a policy that looks for it."""
    LOW = "low"
    """Worth knowing before a long run."""
    INFO = "info"
    """Checks that were skipped and why, and figures."""

    @property
    def rank(self) -> int:
        """0 for the worst."""
        return list(Severity).index(self)

    def at_least(self, other: Severity) -> bool:
        """Whether this is as severe as ``other``, or more."""
        return self.rank <= other.rank


@dataclass(frozen=True)
class Code:
    """One kind of finding."""

    name: str
    severity: Severity
    """The usual severity; evidence may lower it."""
    meaning: str
    advice: str


def _read_codes() -> Mapping[str, Code]:
    text = Path(__file__).with_name("codes.txt").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in text.splitlines() if line and not line.startswith("#")]
    return {name: Code(name, Severity(usual), *words) for name, usual, *words in rows}


CODES = _read_codes()
"""Every code of the built-in probes, by name."""

_CODE = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_LISTED = 50


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One problem of a task, or a fact worth knowing about it."""

    code: str
    """Stable name of the kind of finding, as ``docs/audit.md`` lists it: ``empty-reply``."""

    severity: Severity
    """How bad it is."""

    message: str
    """What was seen, in one or two sentences."""

    sample: int | str | None = None
    """Id of the sample; ``None`` when the finding is about the task, or about many samples."""

    evidence: Mapping[str, Any] = field(default_factory=dict)
    """The evidence, as JSON: ``log`` (an ``.eval`` file), ``sample`` and ``epoch`` in it,
    ``policy``, ``reward``, ``samples``, ``excerpt`` …"""

    advice: str = ""
    """What to do about it; the code's advice if empty."""

    def __post_init__(self) -> None:
        if not _CODE.fullmatch(self.code):
            raise ValueError(f"{self.code!r} is no code: write words-with-hyphens")
        if self.severity not in [*Severity]:
            raise ValueError(f"{self.severity!r} is no severity; there is {', '.join(Severity)}")
        object.__setattr__(self, "severity", Severity(self.severity))


BySample = Mapping[int | str, tuple[str, Mapping[str, Any] | Shown]]
"""Message and evidence by sample."""

SHOWN = 12
"""Findings with the same code that name one sample each; further samples share one finding."""


def finding(
    code: str,
    message: str,
    shown_by: Shown | Sequence[Shown] = (),
    *,
    sample: int | str | None = None,
    severity: Severity | None = None,
    **evidence: Any,
) -> Finding:
    """Make a finding with a built-in code, whose advice and usual severity it has.

    It names the episode that shows it, or the first of a list of them, the best first. If all in a
    list are of one sample, the finding is about that.
    """
    if not isinstance(shown_by, Sequence):
        evidence = shown_by.evidence(**evidence)
    elif shown_by:
        ids = list(dict.fromkeys(record.sample for record in shown_by))
        evidence = shown_by[0].evidence(**{"samples": ids[:_LISTED], **evidence})
        sample = ids[0] if len(ids) == 1 else sample
    return Finding(
        code=code,
        severity=severity or CODES[code].severity,
        sample=sample,
        message=message,
        evidence=evidence,
        advice=CODES[code].advice,
    )


def on_samples(some: Sized, tried: Sized) -> str:
    """Write on how many of the samples something was seen: ``2 of 3 samples``."""
    return part_of(len(some), len(tried), "sample")


def by_share(some: Sized, tried: Sized) -> Severity:
    """Grave if it was seen on half of the samples."""
    return Severity.HIGH if 2 * len(some) >= len(tried) else Severity.MEDIUM


def per_sample(code: str, seen: BySample, *, severity: Severity | None = None) -> list[Finding]:
    """Make a finding for each of the first samples, and one for all others together."""
    found = []
    for id, (message, shown) in list(seen.items())[:SHOWN]:
        evidence = shown.evidence() if isinstance(shown, Shown) else shown
        given = finding(code, message, sample=id, severity=severity)
        found.append(replace(given, evidence=evidence))
    if rest := list(seen)[SHOWN:]:
        message = f"{CODES[code].meaning} The same holds for {len(rest)} more samples."
        found.append(finding(code, message, severity=severity, samples=rest))
    return found
