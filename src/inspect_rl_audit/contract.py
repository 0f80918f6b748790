"""The contract of probes: what they are, and what they receive: options, references, a stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from inspect_ai import Task
from inspect_ai.dataset import Sample

from inspect_rl_audit.policies import FORMS, Play, PolicyReply
from inspect_rl_audit.records import EpisodeRecord, Finding, ModelAttempt, PolicyKind
from inspect_rl_audit.stage import Stage
from inspect_tinker_plugin import ConfigError
from inspect_tinker_plugin.options import DatasetOptions
from inspect_tinker_plugin.tasks import targets

T = TypeVar("T")

TINY = 1e-6
"""Rewards closer than this count as equal."""

DEFAULT_BUDGET = ("1500", "20m")
"""Episodes and minutes of one run."""

_SCRIPTED = ("mockllm", "scripted")
"""Providers whose models say what a test wants: as judges, they do not judge."""


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """Options of an audit."""

    out: Path
    """Folder for ``audit.html``, ``audit.json``, the logs and the journal."""

    probes: Sequence[str | Probe] = ()
    """Probes, or expressions that name them; every installed probe when empty."""

    dataset: DatasetOptions = field(default_factory=DatasetOptions)
    """Samples, reward, solver, sandbox and models, as for training."""

    samples: int = 8
    """Number of samples for the expensive probes."""

    wide: int | None = None
    """Samples that are played once with and once without the answer; by default 200, and 40 if
    they need a sandbox each."""

    gold: str | None = None
    """Field of the metadata, or shell script, with the right answer; the target if not given."""

    budget: Sequence[str] = DEFAULT_BUDGET
    """Episodes (``200``), seconds (``90s``) or minutes (``10m``) of one run."""

    parallel: int = 4
    """Episodes at once."""

    prompt_tokens: int | None = None
    """Maximum tokens of a prompt."""

    slow_scoring: float = 10.0
    """Seconds that scoring one episode may usually take; one policy's may take three times as
    long."""

    group_size: int = 8
    """Episodes per group, for the cost plan."""

    prices: Mapping[str, float] | None = None
    """Prices by kind, as ``read_prices()`` returns them."""

    attempts: Sequence[ModelAttempt] = ()
    """Attempts of a real model."""

    test_samples: Sequence[Sample] = ()
    """Samples of the test task."""


@dataclass(frozen=True)
class Gold:
    """The source of the right answers: the targets, a field of the metadata, or a script."""

    source: str | None = None
    """A field of the metadata, or a shell script that solves the sample in its sandbox."""

    @property
    def script(self) -> Path | None:
        """The script, if one was named."""
        path = Path(self.source or "")
        return path if path.suffix == ".sh" and path.is_file() else None

    def of(self, sample: Sample) -> str | None:
        """Return the named answer; ``None`` if it is the target."""
        if self.source is None or self.script is not None:
            return None
        value = (sample.metadata or {}).get(self.source)
        return None if value is None else str(value)

    def check(self, samples: Sequence[Sample]) -> None:
        """Raise a `ConfigError` if the source is neither a script nor a field of any sample."""
        if self.source is None or self.script is not None or not samples:
            return
        if self.source.endswith(".sh"):
            raise ConfigError(f"there is no solution script {self.source} (--gold)")
        fields = sorted({str(name) for sample in samples for name in sample.metadata or {}})
        if self.source not in fields:
            known = f"; they have {', '.join(fields[:20])}" if fields else " at all"
            raise ConfigError(
                f"no sample has metadata with the field {self.source!r} (--gold){known}"
            )

    def known(self, sample: Sample) -> bool:
        """Whether there is a right answer to a sample."""
        if self.script is not None or self.of(sample):
            return True
        return self.source is None and bool(targets(sample))


@runtime_checkable
class Probe(Protocol):
    """Examines one aspect of a task and reports its problems.

    A probe runs episodes on the stage of its `AuditContext`, examines the samples, or reads
    logs. It is called once per audit; an audit that is continued calls it again, and the stage
    then returns the earlier episodes from its journal.
    """

    async def __call__(self, audit: AuditContext) -> Sequence[Finding]:
        """Examine the task and return the findings."""
        ...


@dataclass(frozen=True)
class Reference:
    """The rewards of honest policies: without an answer, and with the right one."""

    null: Mapping[int | str, EpisodeRecord]
    """By sample: "I do not know."."""

    gold: Mapping[int | str, EpisodeRecord]
    """By sample: the right answer in the form that pays best; samples without one are absent."""

    form: str
    """The form of the right answer that earns a reward on most samples."""

    full: float
    """The full reward: 1, or what the right answer earns if that is more."""

    @property
    def scored(self) -> bool:
        """Whether episodes reach scores that say something; without a real judge they do not."""
        causes = {record.cause for record in self.null.values()}
        unscored = {"judge", "sandbox", "solver", "tool", "policy"}
        return bool(causes - unscored) and self.missing_judge is None

    @property
    def missing_judge(self) -> str | None:
        """Why there is no judge whose scores mean something, if the scorers ask for one."""
        records = list(self.null.values())
        if {record.cause for record in records} == {"judge"}:
            return f"The scorer asks a model that is not available: {records[0].error}"
        asked = {str(name) for record in records for name in record.notes.get("judges", [])}
        scripted = sorted(name for name in asked if name.partition("/")[0] in _SCRIPTED)
        return f"The judge {', '.join(scripted)} follows a script." if scripted else None

    @property
    def gold_works(self) -> bool:
        """Whether the right answer earns the full reward on some sample."""
        return any(self.is_full(record.reward) for record in self.gold.values())

    def write(self, answer: str) -> str:
        """Write an answer in the form that pays."""
        return FORMS[self.form](answer)

    def null_of(self, sample: Sample) -> EpisodeRecord | None:
        """Return the episode of the policy without an answer."""
        return None if sample.id is None else self.null.get(sample.id)

    def gold_of(self, sample: Sample) -> EpisodeRecord | None:
        """Return the episode with the right answer."""
        return None if sample.id is None else self.gold.get(sample.id)

    def pays(self, sample: Sample) -> bool:
        """Whether the right answer to a sample earns the full reward."""
        record = self.gold_of(sample)
        return record is not None and self.is_full(record.reward)

    def is_full(self, reward: float | None) -> bool:
        """Whether a reward is the full one."""
        return reward is not None and reward >= self.full - TINY

    def full_of(self, records: Sequence[EpisodeRecord]) -> list[EpisodeRecord]:
        """Return the episodes that earned the full reward."""
        return [record for record in records if self.is_full(record.reward)]

    def beats_null(self, record: EpisodeRecord) -> bool:
        """Whether an episode earned more than an honest policy without an answer."""
        return beats(record, self.null.get(record.sample))


def beats(record: EpisodeRecord, honest: EpisodeRecord | None) -> bool:
    """Whether an episode earned more than an honest one, and more than nothing."""
    base = honest.reward if honest is not None and honest.reward is not None else 0.0
    return record.reward is not None and record.reward > max(base, 0.0) + TINY


@dataclass(frozen=True, kw_only=True)
class AuditContext:
    """What every probe of an audit receives."""

    task: Task
    """The task; it must not be changed."""

    samples: Sequence[Sample]
    """Its samples, filtered and transformed as for training, each with an id."""

    chosen: Sequence[Sample]
    """A few of them, spread over the dataset: for checks that need many episodes per sample."""

    wide: Sequence[Sample]
    """More of them, including ``chosen``: for checks with one or two episodes per sample."""

    boxed: bool
    """Whether samples need a sandbox each, so that episodes take long to start."""

    stage: Stage
    """Runs episodes."""

    reference: Reference
    """The rewards of honest policies."""

    gold: Gold
    """Where the right answers come from."""

    folder: Path
    """The audit's folder; a probe may write its own files below it."""

    options: AuditOptions
    """The options of this audit."""

    figures: dict[str, Any] = field(default_factory=dict)
    """Numbers for the summary; a probe adds its own under its own name."""

    @property
    def judged(self) -> bool:
        """Whether rewards can be checked: not if a judge is missing, or no episode runs."""
        return bool(self.task.scorer) and self.reference.scored

    def some(self, items: Sequence[T], count: int) -> Sequence[T]:
        """Return the first of samples or plays, and half as many if each needs a sandbox."""
        return items[: max(1, count // 2) if self.boxed else count]

    async def play(
        self,
        policy: str,
        samples: Sequence[Sample],
        reply_to: Callable[[Sample], PolicyReply | None],
        kind: PolicyKind = "other",
    ) -> list[EpisodeRecord]:
        """Play a policy on samples, but for those to which it has no reply."""
        replies = [(sample, reply_to(sample)) for sample in samples]
        plays = [
            Play(policy=policy, kind=kind, sample=sample, reply=reply)
            for sample, reply in replies
            if reply is not None
        ]
        return await self.stage.run(plays)
