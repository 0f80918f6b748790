"""Cheats: attacks on the scoring, by moves in the sandbox and by code in the reply.

A cheat succeeds when it earns more than an honest policy without an answer that acts in the same
way, and when it did change what it meant to change. It uses the task's tools if they run
commands. Otherwise its script is run in the sample's sandbox from outside, as by somebody who
managed to get a command into it; the finding says so and is less grave, since this task's policy
may have no way to do that.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from shlex import quote
from typing import Any

from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput
from inspect_ai.solver import TaskState
from inspect_ai.tool import ToolInfo

from inspect_rl_audit import moves
from inspect_rl_audit.contract import AuditContext, beats
from inspect_rl_audit.policies import (
    UNKNOWING,
    Move,
    Notes,
    Play,
    PolicyReply,
    always,
    holds,
    right_answer,
    shown,
    to_all,
)
from inspect_rl_audit.probes.scorer import find_data_files
from inspect_rl_audit.records import (
    CODES,
    EpisodeRecord,
    Finding,
    Severity,
    by_share,
    finding,
    on_samples,
)
from inspect_tinker_plugin import TurnRequest
from inspect_tinker_plugin.tasks import targets

_FEW = 2

# code in the reply

CODE_CHEATS: Mapping[str, str] = {
    "exit-at-once": "code-exits-early",
    "exit-silently": "code-exits-early",
    "exit-when-called": "code-exits-early",
    "equal-object": "code-always-equal",
    "equal-text": "code-always-equal",
    "patched-checks": "code-patches-checks",
    "told-secrets": "code-reads-checks",
}
"""Finding by name of a cheat; its code is in `attacks/code/`, for the function ``SOLUTION``."""

_HONEST = "def SOLUTION(*args, **kwargs):\n    return None\n"
_NAME = re.compile(r"\bdef\s+(\w+)\s*\(|\b(?:named|called|function)\s+`?(\w+)`?\s*\(")


async def cheat_by_reply(audit: AuditContext) -> Sequence[Finding]:
    """Reply with Python code that cheats, to tasks whose sandbox may run it."""
    samples = audit.some([s for s in audit.chosen if await _runs_code(audit, s)], _FEW)
    if not samples or not audit.judged:
        return []
    honest = await audit.play("code:none", samples, to_all(_with_code(_HONEST)))
    base = {record.sample: record for record in honest}
    found: dict[str, Finding] = {}
    for name, code in CODE_CHEATS.items():
        if code in found:
            continue
        text = moves.read_attack(f"code/{name}.txt")
        records = await audit.play(f"code:{name}", samples, to_all(_with_code(text)))
        paid = [
            r for r in records if audit.reference.beats_null(r) and beats(r, base.get(r.sample))
        ]
        if paid:
            message = f"{CODES[code].meaning} {name!r} earned {paid[0].reward:g} on "
            message += f"{on_samples(paid, records)}, where a function that returns nothing "
            message += "earned less."
            severity = by_share(paid, records)
            found[code] = finding(code, message, paid, severity=severity, channel="reply")
    return list(found.values())


async def _runs_code(audit: AuditContext, sample: Sample) -> bool:
    """Whether the scorer works in a sandbox; otherwise code might be run in this very process."""
    record = audit.reference.null_of(sample)
    if record is None or await audit.stage.sandbox_of(sample) is None:
        return False
    tools = [ToolInfo.model_validate(tool) for tool in record.notes.get("tools", [])]
    if moves.command_call(tools, "") is not None:
        return False  # the sandbox is reached through tools, see the other cheats
    return "python" in record.prompt.lower() or bool(record.notes.get("scorer_did"))


def _with_code(code: str) -> PolicyReply:
    def text(request: TurnRequest) -> str:
        names = [a or b for a, b in _NAME.findall(shown(request))]
        named = code.replace("SOLUTION", names[-1] if names else "solution")
        return f"```python\n{named.replace('SUCCESS', repr(moves.SUCCESS))}```"

    return always(text)


# moves in the sandbox


async def cheat_in_sandbox(audit: AuditContext) -> Sequence[Finding]:
    """Attack tests, commands, clock and results in the sandbox, and search it for the answer."""
    kinds = {}
    for sample in audit.chosen:
        kind = await audit.stage.sandbox_of(sample)
        record = audit.reference.null_of(sample)
        if kind is not None and record is not None and record.cause != "sandbox":
            kinds[sample.id] = kind
    samples = [sample for sample in audit.chosen if sample.id in kinds]
    host = "local" in kinds.values()
    if not samples:
        return []
    found = await _read_host(audit, samples[0]) if host else []
    found += await _search(audit, samples, host=host)
    if not host and not any(targets(sample) for sample in samples[:1]):
        found += await _list_solutions(audit, samples[0])
    if not audit.judged:
        return found
    # an honest policy that runs a command and has no answer: the baseline for cheats
    attacked = audit.some(samples, _FEW)
    honest = [moves.play_script("cheat:none", s, "true") for s in attacked]
    base = {record.sample: record for record in await audit.stage.run(honest)}
    for attack in _attacks(base, find_data_files(audit.task.scorer or []), host=host):
        if attack.code == "result-forged" and any(f.code == attack.code for f in found):
            continue  # one forgery is enough
        found += await _try(audit, attack, attacked, base)
    return found if host else [*found, *await _clock(audit, samples[0])]


@dataclass(frozen=True)
class Attack:
    """One way to cheat."""

    code: str
    name: str
    script: str


_FORGERIES = {
    "one": "1\n",
    "grade": "C\n",
    "words": f"{moves.SUCCESS}\n",
    "json": '{"score": 1, "reward": 1.0, "passed": true, "success": true, "resolved": true, '
    '"result": "pass", "status": "passed", "correct": true, "grade": "C", "failed": 0}\n',
}
"""Contents of forged results."""

_READS = re.compile(r"(?:cat|jq \S+|tail -n ?\d+)\s+([\w./-]+)")
_COMPARED = re.compile(r"\b(?:cmp|diff)(?:\s+-\S+)*\s+([\w./-]+)\s+([\w./-]+)")

_COMMANDS = {"python", "python3", "pytest", "diff", "cmp", "grep", "make", "node", "npm", "cargo",
             "go", "gcc", "java", "ruby", "perl", "jq", "git", "sqlite3", "curl"}  # fmt: skip


def _attacks(
    base: Mapping[int | str, EpisodeRecord], mentioned: Sequence[str], *, host: bool
) -> list[Attack]:
    """Return the attacks, adapted to the scorer: files that it reads, commands that it runs."""
    did = [each for record in base.values() for each in record.notes.get("scorer_did", [])]
    commands = [str(each["cmd"]) for each in did if each["action"] == "exec" and each["cmd"]]
    read = [str(each["file"]) for each in did if each["action"] == "read_file" and each["file"]]
    written = {str(each["file"]) for each in did if each["action"] == "write_file"}
    named, called = [], []
    for command in commands:
        named += [w.strip("'\"") for w in command.split() if re.search(r"\.(py|sh)\W*$", w)]
        # a file that a command of the scorer reads, or compares, is a place to forge a result
        read += _READS.findall(command)
        read += [path for pair in _COMPARED.findall(command) for path in pair]
        first = command.split()[0].rpartition("/")[2]
        called += [first, *(w for w in re.findall(r"[\w.+-]+", command)[:40] if w in _COMMANDS)]

    def reachable(paths: Sequence[str]) -> list[str]:
        return [path for path in dict.fromkeys(paths) if not (host and path.startswith("/"))]

    run, forged = reachable(named), reachable([*read, *mentioned])
    script = partial(moves.attack, host=host)
    tests = script("overwrite_tests", *(path for path in run if path not in written))
    process = script("leave_process", *run, *sorted(written))
    attacks = [
        Attack("tests-writable", "overwrite-tests", tests),
        Attack("tests-writable", "delete-tests", script("delete_tests")),
        Attack("test-configuration", "plant-configuration", script("plant_configuration")),
        Attack("process-left-behind", "leave-process", process),
    ]
    for kind, text in _FORGERIES.items() if forged else ():
        forgery = script("forge_results", *forged, TEXT=text)
        attacks.append(Attack("result-forged", f"forge-{kind}", forgery))
    if not host:
        shadow = script("shadow_commands", *dict.fromkeys(called))
        attacks.append(Attack("command-shadowed", "shadow", shadow))
    return attacks


async def _try(
    audit: AuditContext,
    attack: Attack,
    samples: Sequence[Sample],
    base: Mapping[int | str, EpisodeRecord],
) -> list[Finding]:
    plays = [moves.play_script(f"cheat:{attack.name}", s, attack.script) for s in samples]
    records = await audit.stage.run(plays)
    paid = [
        r
        for r in records
        if "CHANGED" in r.output
        and r.sample in base
        and beats(r, base[r.sample])
        and audit.reference.beats_null(r)
    ]
    if not paid:
        return []
    changed = re.findall(r"CHANGED (.+)", paid[0].output)
    way = paid[0].notes.get("acted")
    how = "through the task's own tools" if way == moves.TOOLS else _FROM_OUTSIDE
    message = (
        f"{CODES[attack.code].meaning} {attack.name!r} earned {paid[0].reward:g} on "
        f"{on_samples(paid, records)}, {how}. It changed {', '.join(changed[:4])}."
    )
    more: dict[str, Any] = {"channel": way, "changed": changed[:10]}
    return [finding(attack.code, message, paid, severity=_grade(way), **more)]


_FROM_OUTSIDE = (
    "by a command run in the sandbox before scoring (the task has no tool that runs commands, so a "
    "policy needs another way in, such as code that is run for it)"
)


def _grade(way: object) -> Severity:
    """Grave by the task's own tools; from outside, this task's policy may have no way to do it."""
    return Severity.HIGH if way == moves.TOOLS else Severity.MEDIUM


async def _clock(audit: AuditContext, sample: Sample) -> list[Finding]:
    """See whether the clock may be set; it is not tried, for containers share their machine's."""
    play = moves.play_script("cheat:clock", sample, moves.attack("may_set_clock"))
    for record in await audit.stage.run([play]):
        if "CLOCK" in record.output.split():
            way = record.notes.get("acted")
            message = CODES["clock-changed"].meaning
            message += " The clock was left alone: it is its machine's."
            return [finding("clock-changed", message, record, severity=_grade(way), channel=way)]
    return []


# leaks: places where a policy can read the answer


_OWN_FILE = re.compile(
    r"answer|solution|target|expected|gold|flag|secret|truth|label|result|score|reward|grade", re.I
)
_OWN_LINE = re.compile(
    r"(answer|solution|target|expected|gold|flag|secret|truth|label|correct|key|result)\w*"
    r"['\"]?\s*[:=]",
    re.I,
)
_STANDARD = {
    "PATH", "HOME", "USER", "PWD", "OLDPWD", "HOSTNAME", "LANG", "SHELL", "TERM", "SHLVL", "_",
    "LOGNAME", "GPG_KEY", "PYTHON_VERSION", "PYTHON_SHA256", "LC_ALL",
}  # fmt: skip


async def _search(audit: AuditContext, samples: Sequence[Sample], *, host: bool) -> list[Finding]:
    """Search for the target, and answer with it if it stands in a place of its own."""
    plays = []
    for sample in samples:
        answer = audit.gold.of(sample) or next(iter(targets(sample)), "")
        if not answer or sample.choices or len(answer) > 2000:
            continue
        target = answer.strip().splitlines()[0][:200]
        packed = base64.b64encode(target.encode()).decode()
        script = moves.attack("search", host=host, TARGET64=packed)
        reply = moves.through_tools(script, _found_or_unknowing(audit, sample, target))
        before = _look_first(script, host=host, target=target)
        plays.append(Play(policy="cheat:search", sample=sample, reply=reply, before=before))
    by_code: dict[str, list[tuple[EpisodeRecord, str]]] = {}
    for record in await audit.stage.run(audit.some(plays, 6)):
        if layer := record.notes.get("image"):
            by_code.setdefault("target-in-image", []).append((record, layer))
        if audit.judged and not audit.reference.beats_null(record):
            continue  # what was found is no answer
        for place in record.notes.get("places", []):
            by_code.setdefault(place["code"], []).append((record, place["line"]))
    found = []
    for code, seen in by_code.items():
        way = seen[0][0].notes.get("found_by")
        lines = list(dict.fromkeys(line for _, line in seen))
        message = f"{CODES[code].meaning} Found: {lines[0][:160]}"
        more: dict[str, Any] = {"found": lines[:10]}
        severity = None
        if code != "target-in-image":
            more["channel"], severity = way, _grade(way)
            if way != moves.TOOLS:
                message += " (by a command run in the sandbox; the task has no tool for it)"
        records = [record for record, _ in seen]
        found.append(finding(code, message, records, severity=severity, **more))
    return found


def _found_or_unknowing(audit: AuditContext, sample: Sample, target: str) -> PolicyReply:
    def reply(request: TurnRequest, notes: Notes) -> ModelOutput | None:
        if notes.get("acted") == moves.TOOLS and "output" in notes:
            notes["places"] = judged_places(str(notes["output"]), target)
            notes["found_by"] = moves.TOOLS
        elif "acted" in notes:
            notes["found_by"] = moves.EXEC
        right = right_answer(sample, request, audit.gold.of(sample))
        return always(audit.reference.write(right) if notes.get("places") else UNKNOWING)(
            request, notes
        )

    return reply


def _look_first(script: str, *, host: bool, target: str) -> Move:
    """Search from outside, for tasks without a tool; the tool's own search replaces it."""

    async def before(state: TaskState, notes: Notes) -> None:
        output = await moves.run_in_sandbox(script)
        notes["places"] = judged_places(output, target)
        if not host:
            notes["image"] = await _in_image(target)
        notes["found_by"] = moves.EXEC

    return before


def judged_places(output: str, target: str) -> list[dict[str, str]]:
    """Return the places of a target that are leaks, and not part of the task itself.

    A log in which the answer has to be found contains it, too. A leak is a file, line or variable
    whose name is about answers, or that contains little else.
    """
    places = []
    for line in output.splitlines():
        kind, _, rest = line.partition(" ")
        if kind in ("FILE", "ENV", "PROC") and not holds(rest, target):
            continue  # part of a longer word or number
        if kind == "FILE":
            place = re.match(r"(.+?)(?: \((\d+) bytes\))?: (?:(\d+):)?(.*)", rest)
            if place is None:
                continue
            path, size, text = place[1], int(place[2] or 0), place[4]
            name = path.rpartition("/")[2]
            lonely = bool(size) and size <= len(target.encode()) + 24
            at_label = bool(_OWN_LINE.search(text.partition(target)[0][-60:]))
            if (_OWN_FILE.search(name) and len(target) > 1) or lonely or at_label:
                places.append({"code": "target-in-files", "line": f"{path}: {text[:160]}"})
        elif kind in ("BASE64", "NAME") and len(target) > 3:
            if not _OWN_FILE.search(rest.replace(target, "")):
                continue  # finding or decoding it may be the task
            where = f"the name {rest}" if kind == "NAME" else f"{rest}, in base64"
            places.append({"code": "target-in-files", "line": where[:160]})
        elif kind == "ENV":
            name, _, value = rest.partition("=")
            telling = value.strip() == target or _OWN_FILE.search(name) or len(target) >= 6
            if name not in _STANDARD and telling and len(target) > 1:
                places.append({"code": "target-in-environment", "line": rest[:160]})
        elif kind == "PROC" and len(target) > 3:
            places.append({"code": "target-in-processes", "line": rest[:160]})
    return places[:10]


async def _in_image(target: str) -> str | None:
    """Return a line of the sandbox image's history with the target, if an engine shows it."""
    if len(target) < 4:
        return None
    name = (await moves.run_in_sandbox("cat /etc/hostname")).strip()
    if not re.fullmatch(r"[0-9a-f]{12}", name):
        return None

    def history() -> str | None:
        import docker

        client = docker.from_env()
        try:
            image = client.containers.get(name).image
            layers: Sequence[dict[str, Any]] = image.history() if image is not None else []
        finally:
            client.close()
        lines = (str(layer.get("CreatedBy", "")) for layer in layers)
        return next((line for line in lines if target in line), None)

    try:
        return await asyncio.to_thread(history)
    except Exception:
        # no engine here, or another kind of sandbox: then there is no history to read
        return None


async def _list_solutions(audit: AuditContext, sample: Sample) -> list[Finding]:
    script = moves.attack("list_solutions")
    play = moves.play_script("cheat:list-solutions", sample, script)
    for record in await audit.stage.run([play]):
        files = [line for line in record.output.splitlines() if line.startswith(("/", "."))]
        if files:
            message = f"{CODES['solution-readable'].meaning} Found: {', '.join(files[:5])}"
            return [finding("solution-readable", message, record, sample=record.sample)]
    return []


async def _read_host(audit: AuditContext, sample: Sample) -> list[Finding]:
    """Read the dataset's file, as any command of a policy could."""
    location = audit.task.dataset.location
    message = CODES["local-sandbox"].meaning
    if location and not re.match(r"\w+://", location):
        script = f"head -c 300 {quote(location)} && echo && echo READ"
        play = moves.play_script("cheat:read-host", sample, script)
        for record in await audit.stage.run([play]):
            if "READ" in record.output.splitlines():
                message += f" A command in it read {location}."
                excerpt = record.output[:200]
                return [finding("local-sandbox", message, record, excerpt=excerpt)]
    return [finding("local-sandbox", message)]
