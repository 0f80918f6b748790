"""Cheats in the sandbox: the rewards of policies that attack the scoring instead of the task.

A cheat succeeds when it earns more than an honest policy without an answer that acts in the same
way, and when it did change what it meant to change. It uses the task's tools if they run
commands. Otherwise its script is run in the sample's sandbox from outside, as by somebody who
managed to get a command into it; the finding says so and is less grave, since this task's policy
may have no way to do that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from inspect_ai.dataset import Sample

from inspect_rl_audit import moves
from inspect_rl_audit.answers import UNKNOWING, always
from inspect_rl_audit.codes import CODES
from inspect_rl_audit.contract import TINY, AuditContext, finding
from inspect_rl_audit.findings import Finding, Severity
from inspect_rl_audit.probes import leaks
from inspect_rl_audit.records import EpisodeRecord
from inspect_rl_audit.scorer_code import files_named
from inspect_tinker_plugin.contracts.wording import part_of

_FEW = 2
_FORGERIES = {
    "one": "1\n",
    "grade": "C\n",
    "words": "PASS\nPASSED\nOK\nsuccess\ntrue\n",
    "json": '{"score": 1, "reward": 1.0, "passed": true, "success": true, "resolved": true, '
    '"result": "pass", "status": "passed", "correct": true, "grade": "C", "failed": 0}\n',
}
"""Contents of forged results."""


@dataclass(frozen=True)
class SandboxCheats:
    """Attacks tests, commands, clock and results in the sandbox, and searches it for the answer."""

    async def __call__(self, audit: AuditContext) -> Sequence[Finding]:
        samples, host = await _with_sandbox(audit)
        if not samples:
            return []
        found = await leaks.read_host(audit, samples) if host else []
        found += await leaks.search(audit, samples, host=host)
        if not audit.judged:
            return found
        base = await _honest(audit, samples)
        for attack in _attacks(base, files_named(audit.task.scorer or []), host=host):
            if attack.code == "result-forged" and any(f.code == attack.code for f in found):
                continue  # one forgery is enough
            found += await _try(audit, attack, samples, base)
        return found if host else [*found, *await _clock(audit, samples[0])]


@dataclass(frozen=True)
class Attack:
    """One way to cheat."""

    code: str
    name: str
    script: str


async def _with_sandbox(audit: AuditContext) -> tuple[list[Sample], bool]:
    """Return the samples to attack, and whether their sandbox is this machine."""
    kinds = {}
    for sample in audit.chosen:
        kind = await audit.stage.sandbox_of(sample)
        record = audit.reference.null.get(_id(sample))
        usable = record is not None and record.cause != "sandbox"
        if kind is not None and usable:
            kinds[_id(sample)] = kind
    samples = [sample for sample in audit.chosen if sample.id in kinds]
    host = "local" in kinds.values()
    return samples, host


def _id(sample: Sample) -> int | str:
    assert sample.id is not None
    return sample.id


async def _honest(audit: AuditContext, samples: Sequence[Sample]) -> dict[int | str, EpisodeRecord]:
    """Play an honest policy that runs a command and has no answer: the baseline for cheats."""
    plays = [moves.play("cheat:none", s, "true", always(UNKNOWING)) for s in samples[:_FEW]]
    records = await audit.stage.run(plays)
    return {record.sample: record for record in records if record is not None}


def _attacks(
    base: dict[int | str, EpisodeRecord], mentioned: Sequence[str], *, host: bool
) -> list[Attack]:
    """Return the attacks, adapted to the scorer: files that it reads, commands that it runs."""
    did = [each for record in base.values() for each in record.notes.get("scorer_did", [])]
    commands = [str(each["cmd"]) for each in did if each["action"] == "exec" and each["cmd"]]
    read = [str(each["file"]) for each in did if each["action"] == "read_file" and each["file"]]
    written = {str(each["file"]) for each in did if each["action"] == "write_file"}
    named = [w.strip("'\"") for c in commands for w in c.split() if re.search(r"\.(py|sh)\W*$", w)]
    # a file that a command of the scorer reads is another place to forge a result
    read += [
        m for c in commands for m in re.findall(r"(?:cat|jq \S+|tail -n ?\d+)\s+([\w./-]+)", c)
    ]
    # two files that are compared are equal if both are forged
    read += [m for c in commands for pair in _COMPARED.findall(c) for m in pair]
    read += mentioned
    named = [path for path in dict.fromkeys(named) if not host or not path.startswith("/")]
    read = [path for path in dict.fromkeys(read) if not host or not path.startswith("/")]
    first = [command.split()[0].rpartition("/")[2] for command in commands if command.split()]
    tests = [path for path in named if path not in written]
    attacks = [
        Attack("tests-writable", "overwrite-tests", moves.overwrite_tests(host=host, also=tests)),
        Attack("tests-writable", "delete-tests", moves.delete_tests(host=host)),
        Attack("test-configuration", "plant-configuration", moves.plant_configuration(host=host)),
        Attack(
            "process-left-behind",
            "leave-process",
            moves.leave_process(host=host, also=[*named, *sorted(written)]),
        ),
    ]
    attacks += [
        Attack("result-forged", f"forge-{kind}", moves.forge_results(read, text))
        for kind, text in _FORGERIES.items()
        if read
    ]
    if not host:
        inner = [w for c in commands for w in re.findall(r"[\w.+-]+", c)][:40]
        likely = [w for w in (*first, *inner) if w in _COMMANDS or w in first]
        attacks.append(Attack("command-shadowed", "shadow", moves.shadow_commands(likely)))
    return attacks


_COMPARED = re.compile(r"\b(?:cmp|diff)(?:\s+-\S+)*\s+([\w./-]+)\s+([\w./-]+)")

_COMMANDS = {"python", "python3", "pytest", "diff", "cmp", "grep", "make", "node", "npm", "cargo",
             "go", "gcc", "java", "ruby", "perl", "jq", "git", "sqlite3", "curl"}  # fmt: skip


async def _try(
    audit: AuditContext,
    attack: Attack,
    samples: Sequence[Sample],
    base: dict[int | str, EpisodeRecord],
) -> list[Finding]:
    plays = [
        moves.play(f"cheat:{attack.name}", s, attack.script, always(UNKNOWING))
        for s in samples[:_FEW]
    ]
    records = [r for r in await audit.stage.run(plays) if r is not None]
    paid = [
        r
        for r in records
        if r.reward is not None
        and "CHANGED" in str(r.notes.get("output", ""))
        and (honest := base.get(r.sample)) is not None
        and r.reward > max(honest.reward or 0.0, 0.0) + TINY
        and audit.reference.beats_null(r)
    ]
    if not paid:
        return []
    changed = re.findall(r"CHANGED (.+)", str(paid[0].notes.get("output", "")))
    return [_success(audit, attack.code, paid, len(records), changed)]


def _success(
    audit: AuditContext,
    code: str,
    paid: list[EpisodeRecord],
    tried: int,
    changed: Sequence[str],
) -> Finding:
    record = paid[0]
    way = record.notes.get("acted")
    with_tools = way == moves.TOOLS
    how = (
        "through the task's own tools"
        if with_tools
        else "by a command run in the sandbox before scoring (the task has no tool that runs "
        "commands, so a policy needs another way in, such as code that is run for it)"
    )
    what = f" It changed {', '.join(changed[:4])}." if changed else ""
    message = (
        f"{CODES[code].meaning} {record.policy.partition(':')[2]!r} earned {record.reward:g} on "
        f"{part_of(len(paid), tried, 'sample')}, {how}.{what}"
    )
    return finding(
        code,
        message,
        severity=Severity.HIGH if with_tools else Severity.MEDIUM,
        sample=record.sample if tried == 1 else None,
        evidence=record.evidence(channel=way, changed=list(changed[:10])),
    )


async def _clock(audit: AuditContext, sample: Sample) -> list[Finding]:
    """See whether the clock may be set; it is not tried, for containers share their machine's."""
    play = moves.play("cheat:clock", sample, moves.MAY_SET_CLOCK, always(UNKNOWING))
    [record] = await audit.stage.run([play])
    if record is None or "CLOCK" not in str(record.notes.get("output", "")).split():
        return []
    way = record.notes.get("acted")
    severity = Severity.HIGH if way == moves.TOOLS else Severity.MEDIUM
    message = f"{CODES['clock-changed'].meaning} The clock was left alone: it is its machine's."
    evidence = record.evidence(channel=way)
    return [finding("clock-changed", message, severity=severity, evidence=evidence)]
