"""Leaks: places of the sandbox, and of its machine, where a policy can read the answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput
from inspect_ai.solver import TaskState

from inspect_rl_audit import moves
from inspect_rl_audit.answers import FORMS, UNKNOWING, always, right_answer, targets
from inspect_rl_audit.codes import CODES
from inspect_rl_audit.contract import AuditContext, finding
from inspect_rl_audit.findings import Finding, Severity
from inspect_rl_audit.records import EpisodeRecord
from inspect_rl_audit.stage import Move, Notes, Play, PolicyReply
from inspect_tinker_plugin.contracts.episodes import TurnRequest

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


async def search(audit: AuditContext, samples: Sequence[Sample], *, host: bool) -> list[Finding]:
    """Search for the target, and answer with it if it stands in a place of its own."""
    plays = []
    for sample in samples:
        wanted = [audit.gold_of(sample)] if audit.gold_of(sample) else targets(sample)
        if not wanted or sample.choices or len(str(wanted[0])) > 2000:
            continue
        target = str(wanted[0]).strip().splitlines()[0][:200]
        script = moves.search(target, host=host)
        plays.append(
            Play(
                policy="cheat:search",
                sample=sample,
                reply=moves.through_tools(script, _found_or_unknowing(audit, sample, target)),
                before=_look_first(script, host=host, target=target),
                after=None,
            )
        )
    records = [r for r in await audit.stage.run(plays[:6]) if r is not None]
    by_code: dict[str, list[tuple[EpisodeRecord, str]]] = {}
    found: list[Finding] = []
    for record in records:
        if (layer := record.notes.get("image")) and not found:
            message = f"{CODES['target-in-image'].meaning} Found: {layer[:160]}"
            evidence = record.evidence(found=[layer])
            found.append(
                finding("target-in-image", message, sample=record.sample, evidence=evidence)
            )
        if audit.judged and not audit.reference.beats_null(record):
            continue  # what was found is no answer
        for place in record.notes.get("places", []):
            by_code.setdefault(place["code"], []).append((record, place["line"]))
    for code, seen in by_code.items():
        record, line = seen[0]
        way = record.notes.get("found_by")
        lines = list(dict.fromkeys(text for _, text in seen))
        message = f"{CODES[code].meaning} Found: {line[:160]}"
        if way != moves.TOOLS:
            message += " (by a command run in the sandbox; the task has no tool for it)"
        severity = Severity.HIGH if way == moves.TOOLS else Severity.MEDIUM
        ids = list(dict.fromkeys(r.sample for r, _ in seen))
        found.append(
            finding(
                code,
                message,
                severity=severity,
                sample=ids[0] if len(ids) == 1 else None,
                evidence=record.evidence(found=lines[:10], samples=ids, channel=way),
            )
        )
    found += await _solution_files(audit, samples[:1], host=host)
    return found


def _found_or_unknowing(audit: AuditContext, sample: Sample, target: str) -> PolicyReply:
    write = FORMS[audit.reference.form]

    def reply(request: TurnRequest, notes: Notes) -> ModelOutput | None:
        if notes.get("acted") == moves.TOOLS and "output" in notes:
            notes["places"] = judged_places(str(notes["output"]), target, sample)
            notes["found_by"] = moves.TOOLS
        elif "acted" in notes:
            notes["found_by"] = moves.EXEC
        right = right_answer(sample, request, audit.gold_of(sample))
        return always(write(right) if notes.get("places") else UNKNOWING)(request, notes)

    return reply


def _look_first(script: str, *, host: bool, target: str) -> Move:
    """Search from outside, for tasks without a tool; the tool's own search replaces it."""

    async def before(state: TaskState, notes: Notes) -> None:
        output = await moves.run_in_sandbox(script)
        notes["places"] = judged_places(output, target, None)
        if not host:
            notes["image"] = await _in_image(target)
        notes["found_by"] = moves.EXEC

    return before


def judged_places(output: str, target: str, sample: Sample | None) -> list[dict[str, str]]:
    """Return the places of a target that are leaks, and not part of the task itself.

    A log in which the answer has to be found contains it, too. A leak is a file, line or variable
    whose name is about answers, or that contains little else.
    """
    places = []
    for line in output.splitlines():
        kind, _, rest = line.partition(" ")
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
        elif (
            kind == "PROC"
            and len(target) > 3
            and re.search(rf"(?<!\w){re.escape(target)}(?!\w)", rest)
        ):
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


async def _solution_files(
    audit: AuditContext, samples: Sequence[Sample], *, host: bool
) -> list[Finding]:
    if host or any(targets(sample) for sample in samples):
        return []
    script = moves.LIST_SOLUTIONS
    plays = [moves.play("cheat:list-solutions", s, script, always(UNKNOWING)) for s in samples]
    for record in await audit.stage.run(plays):
        lines = str(record.notes.get("output", "") if record is not None else "").splitlines()
        files = [line for line in lines if line.startswith(("/", "."))]
        if record is not None and files:
            message = f"{CODES['solution-readable'].meaning} Found: {', '.join(files[:5])}"
            return [
                finding(
                    "solution-readable", message, sample=record.sample, evidence=record.evidence()
                )
            ]
    return []


async def read_host(audit: AuditContext, samples: Sequence[Sample]) -> list[Finding]:
    """Read the dataset's file, as any command of a policy could."""
    location = audit.task.dataset.location
    message = CODES["local-sandbox"].meaning
    evidence: dict[str, Any] = {}
    if location and not re.match(r"\w+://", location):
        script = f"head -c 300 {moves.quoted(location)} && echo && echo READ"
        [record] = await audit.stage.run(
            [moves.play("cheat:read-host", samples[0], script, always(UNKNOWING))]
        )
        output = str(record.notes.get("output", "")) if record is not None else ""
        if record is not None and "READ" in output.splitlines():
            message += f" A command in it read {location}."
            evidence = record.evidence(excerpt=output[:200])
    return [finding("local-sandbox", message, evidence=evidence)]
