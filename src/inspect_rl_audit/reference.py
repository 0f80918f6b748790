"""The reference of an audit: what honest policies earn, without and with the right answer."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput
from inspect_ai.solver import TaskState

from inspect_rl_audit.answers import FORMS, UNKNOWING, always, gold_reply, targets
from inspect_rl_audit.contract import TINY, Reference
from inspect_rl_audit.moves import act, run_in_sandbox
from inspect_rl_audit.records import EpisodeRecord
from inspect_rl_audit.stage import Notes, Play, Stage
from inspect_tinker_plugin.contracts.episodes import TurnRequest
from inspect_tinker_plugin.contracts.errors import ConfigError

NULL = "unknowing"
"""Name of the honest policy that has no answer."""

SCRIPT = "gold:script"
"""Name of the policy that runs a solution script."""

_SOLVING = 150
"""Seconds that a solution script may take, where it is not run by the task's tool."""

_SAID = 1000
"""Characters of its output that are kept."""

_USUAL = ("ANSWER", "bare")
_FIELDS = ("solution", "canonical_solution", "answer", "gold", "gold_answer", "reference", "label")


@dataclass(frozen=True)
class Gold:
    """The source of the right answers: the targets, a field of the metadata, or a script."""

    source: str | None = None
    """A field of the metadata, or a shell script that solves the sample in its sandbox."""

    @property
    def script(self) -> Path | None:
        """The script, if one was named."""
        path = Path(self.source) if self.source else None
        return path if path is not None and path.suffix == ".sh" and path.is_file() else None

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


async def learn_reference(
    stage: Stage, chosen: Sequence[Sample], wide: Sequence[Sample], gold: Gold
) -> Reference:
    """Play the honest policies.

    Args:
        stage: Runs the episodes.
        chosen: Samples on which every form of an answer is tried.
        wide: Samples on which the best form is played, and other forms if it does not pay.
        gold: The source of the right answers.
    """
    null = await _unknowing(stage, chosen)
    if any(record.error is None or record.cause == "judge" for record in null.values()):
        null = await _unknowing(stage, wide)
    judged = Reference(null=null, gold={}, form="", full=1.0).scored
    known = [sample for sample in wide if gold.known(sample)] if judged else []
    best: dict[int | str, EpisodeRecord] = {}
    form = _USUAL[0]
    if known:
        first = [sample for sample in chosen if gold.known(sample)]
        form = await _try_forms(stage, first, gold, best)
        others = [sample for sample in known if sample.id not in best]
        await _play(stage, others, form, gold, best)
        failing = [s for s in others if s.id in best and (best[s.id].reward or 0) < 1 - TINY]
        for other in FORMS:
            if failing and other != form:
                await _play(stage, failing[:8], other, gold, best)
    full = max([1.0, *(r.reward for r in best.values() if r.reward is not None)])
    return Reference(null=null, gold=best, form=form, full=full)


async def _unknowing(stage: Stage, samples: Sequence[Sample]) -> Mapping[int | str, EpisodeRecord]:
    plays = [Play(policy=NULL, sample=s, reply=always(UNKNOWING)) for s in samples]
    return _by_sample(await stage.run(plays))


async def _try_forms(
    stage: Stage, samples: Sequence[Sample], gold: Gold, best: dict[int | str, EpisodeRecord]
) -> str:
    """Play the forms until one pays in full everywhere; return the one that pays most."""
    sums: dict[str, float] = {}
    rest = list(samples)
    for form in FORMS:
        if form not in _USUAL:
            rest = [s for s in samples if s.id not in best or (best[s.id].reward or 0) < 1 - TINY]
            if not rest:
                break
        played = await _play(stage, rest, form, gold, best)
        sums[form] = sum(max(record.reward or 0.0, 0.0) for record in played)
    if gold.source is None and all((best[s.id].reward or 0) <= 0 for s in samples if s.id in best):
        for field in _FIELDS:
            own = [s for s in samples if isinstance((s.metadata or {}).get(field), str)]
            for form in ("bare", "code"):
                if own:
                    await _play(stage, own, form, Gold(field), best, f":{field}")
    return max(sums, key=lambda form: sums[form]) if sums else _USUAL[0]


async def _play(
    stage: Stage,
    samples: Sequence[Sample],
    form: str,
    gold: Gold,
    best: dict[int | str, EpisodeRecord],
    mark: str = "",
) -> list[EpisodeRecord]:
    """Play one form, and keep the episodes that pay better than those kept so far."""
    records = await stage.run([gold_play(sample, form, gold, mark) for sample in samples])
    played = [record for record in records if record is not None]
    for record in played:
        known = best.get(record.sample)
        if known is None or _rank(record) > _rank(known):
            best[record.sample] = record
    return played


def gold_play(sample: Sample, form: str, gold: Gold, mark: str = "") -> Play:
    """Return a play of the right answer to a sample."""
    policy = f"gold:{form}{mark}"
    if gold.script is not None:
        return _script_play(sample, gold.script)
    return Play(policy=policy, sample=sample, reply=gold_reply(sample, form, gold.of(sample)))


def _script_play(sample: Sample, script: Path) -> Play:
    """Return a play that runs a solution script in the sandbox, with a tool if there is one."""
    packed = base64.b64encode(script.read_bytes()).decode()
    shell = (
        f"printf %s {packed} | base64 -d > .solution.sh && chmod +x .solution.sh\n"
        'case "$(head -c 2 .solution.sh)" in "#!") ./.solution.sh ;; *) sh .solution.sh ;; esac\n'
        "code=$?; rm -f .solution.sh; exit $code"
    )
    answer = ", ".join(targets(sample)) or "Done."
    finish = always(answer)

    def reply(request: TurnRequest, notes: Notes) -> ModelOutput | None:
        if not notes.get("acted"):
            done = act(shell, request)
            if done is not None:
                notes["acted"] = True
                return done
        elif "solution" not in notes:
            said = [message.text for message in request.messages if message.role == "tool"]
            notes["solution"] = said[-1][-_SAID:] if said else ""
        return finish(request, notes)

    async def after(state: TaskState, notes: Notes) -> None:
        if not notes.get("acted"):
            notes["solution"] = (await run_in_sandbox(shell, _SOLVING))[-_SAID:]

    return Play(policy=SCRIPT, sample=sample, reply=reply, after=after)


def _rank(record: EpisodeRecord) -> tuple[bool, float]:
    return record.reward is not None, record.reward or 0.0


def _by_sample(records: Sequence[EpisodeRecord | None]) -> Mapping[int | str, EpisodeRecord]:
    return {record.sample: record for record in records if record is not None}
