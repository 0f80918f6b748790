"""A sandbox where the policy never was, with those of its files that are to be scored."""

from __future__ import annotations

import base64
import re
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from pathlib import PurePosixPath
from shlex import quote
from typing import Any

from inspect_ai.event import InfoEvent
from inspect_ai.util import SandboxEnvironment, sandbox

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.errors import Cause
from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.episode.boundaries import Stamp, running_boundaries
from inspect_tinker_plugin.episode.sandbox import SampleSandboxes, sample_sandboxes
from inspect_tinker_plugin.episode.stages import SampleRecord

MOST_BYTES = 4_000_000
"""Bytes that are copied into one clean sandbox; text of a command may have 10 MiB in all."""

MOST_FILES = 200
"""Files that are copied into one clean sandbox."""

_SECONDS = 60

_STARTED_FROM = re.compile(
    r"(conftest|sitecustomize|usercustomize)(\.py)?|noxfile\.py|.*\.(pth|pyc)|__pycache__|"
    r"pytest\.(ini|toml)|tox\.ini|setup\.cfg|pyproject\.toml|package\.json|node_modules|"
    r".*\.config\.[cm]?[jt]sx?|(GNUm|m|M)akefile|\..*"
)
"""Files that test runners and interpreters load by themselves: no pattern matches them."""

_MODULES = sys.stdlib_module_names - {"test"} | {
    *("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
}
"""What a test runner imports: a module of this name in its folder would be run in its place."""

_LIST = r"""
IFS='
'
left={most}
for p in base64 dirname find tr wc; do
 command -v "$p" >/dev/null || {{ echo "there is no $p"; exit; }}
done
for p in {patterns}; do
 case "$p" in */'**') set -- $(find "${{p%/**}}" -type f 2>/dev/null);; *) set -- $p;; esac
 for f in "$@"; do
  [ -f "$f" ] || continue
  d=$f
  while [ "$d" != . ] && [ "$d" != / ]; do
   if [ -L "$d" ]; then echo "LINK $f"; continue 2; fi
   d=$(dirname "$d")
  done
  n=$(wc -c < "$f") || continue
  if [ "$n" -gt "$left" ]; then echo "LARGE $f"; continue; fi
  left=$((left - n))
  echo "FILE $f"
  base64 < "$f" | tr -d '\n'
  echo
 done
done
echo END
"""
"""Prints files by pattern, each as a line with its name and one with its contents. It runs as the
sandbox's usual user in the policy's own sandbox, so all that it can give is what the policy may
write; names are compared with the patterns here."""


@dataclass(frozen=True)
class Copied:
    """What was taken over from the policy's sandbox, by path."""

    files: dict[str, bytes]
    left: dict[str, str]
    """Paths that were not copied, with the reason."""
    problem: str = ""
    """Why files could not be listed to the end."""


@dataclass(frozen=True)
class _Scored:
    """The episode that is being scored."""

    record: SampleRecord
    own: SampleSandboxes
    """The sandboxes in which the policy worked."""


_scored: ContextVar[_Scored | None] = ContextVar("inspect_tinker_plugin_scored", default=None)


@asynccontextmanager
async def scoring_sandbox(record: SampleRecord) -> AsyncIterator[None]:
    """Score inside a block: in a clean sandbox, if the task or the options want that.

    Raises:
        Exception: The clean sandbox cannot be started; the cause is ``sandbox``.
    """
    token = _scored.set(_Scored(record, record.sandboxes))
    try:
        wanted = record.task.score_files
        unscored = record.error is not None and not record.task.score_on_error
        if wanted is None or unscored or not record.sandboxes.environments:
            yield
            return
        async with _fresh_sandbox(record, record.sandboxes, wanted) as fresh:
            own, record.sandboxes = record.sandboxes, fresh
            try:
                yield
            finally:
                record.sandboxes = own
    finally:
        _scored.reset(token)


@asynccontextmanager
async def clean_sandbox(copy: Sequence[str] = ()) -> AsyncIterator[SandboxEnvironment]:
    """Give a scorer a sandbox where the policy never was; inside the block, ``sandbox()`` is it.

    It has the sample's files and set-up. Outside of an episode, in ``inspect eval``, it is the
    sample's own sandbox.

    Args:
        copy: Files to take over from the policy's sandbox: paths and patterns as for
            ``score_files``.

    Raises:
        Exception: It cannot be started; the episode's cause is then ``sandbox``.
    """
    scored = _scored.get()
    if scored is None or not scored.own.environments:
        yield sandbox()
        return
    async with _fresh_sandbox(scored.record, scored.own, copy):
        yield sandbox()


@asynccontextmanager
async def _fresh_sandbox(
    record: SampleRecord, own: SampleSandboxes, patterns: Sequence[str]
) -> AsyncIterator[SampleSandboxes]:
    task, sample = record.task, record.sample
    copied = await copy_files(next(iter(own.environments.values())), patterns)
    spec = await task.sandbox_of(sample)
    assert spec is not None, "the policy has one"
    before, started = dict(copy_context().items()), time.perf_counter()
    # beyond max_sandboxes: episodes that hold a place would wait for each other's
    opened = sample_sandboxes(
        task, spec, sample, metrics={}, doing=lambda doing: None, beyond_bound=True
    )
    async with AsyncExitStack() as stack:
        try:
            fresh = await stack.enter_async_context(opened)
            box = next(iter(fresh.environments.values()))
            if copied.problem:  # of the image, or of what the policy has done to it?
                if problem := (await copy_files(box, patterns)).problem:
                    raise RuntimeError(
                        f"files cannot be copied into the clean sandbox: {problem} in the image"
                    )
                copied.left.update(dict.fromkeys(patterns, copied.problem))
            given = [path.rpartition(":")[2] for path in sample.files or {}]
            for path, contents in copied.files.items():
                if path not in patterns and any(_may_be_same(path, each) for each in given):
                    copied.left[path] = "the sample has its own file of this name"
                elif not await _write_file(box, path, contents):
                    copied.left[path] = "a clean sandbox cannot hold it"
        except Exception as error:
            stamp = Stamp(Cause.SANDBOX, "the start of the clean sandbox")
            record.boundaries.stamp(error, stamp)
            raise
        changed = [v for v, value in copy_context().items() if before.get(v, v) is not value]
        for variable in changed:  # what Inspect has bound for the clean sandbox
            if variable in before:
                stack.callback(variable.set, before[variable])
        record.metrics["sandbox/fresh_s"] = time.perf_counter() - started
        if record.task.keep_log:
            taken = [path for path in copied.files if path not in copied.left]
            data: Any = {"copied": taken, "not_copied": dict(copied.left)}
            internals.record_event(InfoEvent(source="score_sandbox", data=data))
        yield fresh


async def _write_file(box: SandboxEnvironment, path: str, contents: bytes) -> bool:
    """Write a file that the policy has named; whether a clean sandbox can hold one of this name.

    It may be too long, or below a file. Providers have no common error for that, so the sandbox is
    tried, and the file once more.

    Raises:
        Exception: The sandbox does not work.
    """
    try:
        await box.write_file(path, contents)
    except Exception:
        if not (await box.exec(["sh", "-c", ":"], timeout=_SECONDS)).success:
            raise
        try:
            await box.write_file(path, contents)
        except Exception:
            return False
    return True


async def copy_files(box: SandboxEnvironment, patterns: Sequence[str]) -> Copied:
    """Read the regular files that match patterns, within the bounds.

    Args:
        box: The sandbox.
        patterns: Paths and patterns, from its working folder, as ``sh`` reads them; ``folder/**``
            is every file below a folder. Links are not followed.
    """
    copied = Copied({}, {})
    if not patterns:
        return copied
    # quoted: each pattern is expanded where it is used
    script = _LIST.format(most=MOST_BYTES, patterns=" ".join(map(quote, patterns)))
    try:
        done = await box.exec(["sh", "-c", script], timeout=_SECONDS)
        said, listed = done.stderr or done.stdout, done.stdout.removesuffix("\n").split("\n")
    except Exception as error:
        boundaries = running_boundaries()
        if boundaries is None or (
            boundaries.attribute(error, Cause.SCORER).cause is not Cause.INSIDE_SANDBOX
        ):
            raise
        said, listed = str(error), [""]  # the policy can cause that, and it is not the scorer's
    if listed[-1] != "END":
        return Copied({}, {}, f"its files could not be listed: {said[-200:].strip()}")
    lines = iter(listed)
    for line in lines:
        kind, _, path = line.partition(" ")
        if kind in ("LINK", "LARGE"):
            copied.left[path] = "a link" if kind == "LINK" else f"over {MOST_BYTES:,} bytes in all"
        if kind != "FILE":
            continue
        packed = next(lines, "")
        if path in copied.files:
            continue
        if not _is_wanted(path, patterns):
            copied.left[path] = "no pattern may match it"
        elif len(copied.files) >= MOST_FILES:
            copied.left[path] = f"over {counted(MOST_FILES, 'file')}"
        else:
            try:
                copied.files[path] = base64.b64decode(packed, validate=True)
            except ValueError:
                copied.left[path] = "unreadable"
    there = {*copied.files, *copied.left}
    missing = {each for each in patterns if not re.search(r"[*?\[]", each)} - there
    copied.left.update(dict.fromkeys(sorted(missing), "not there"))
    return copied


def _is_wanted(path: str, patterns: Sequence[str]) -> bool:
    """Whether a path, which the policy may have made up, matches one of the patterns."""
    plain = path.removeprefix("./")
    return path in patterns or any(_matches(plain, each.removeprefix("./")) for each in patterns)


def _matches(path: str, pattern: str) -> bool:
    pure = PurePosixPath(path)
    made_up = ".." in pure.parts or str(pure) != path
    made_up = made_up or pure.is_absolute() != pattern.startswith("/")
    if made_up or not re.fullmatch(_as_regex(pattern), path):
        return False
    folder = re.split(r"[*?\[]", pattern)[0].rpartition("/")[0]
    parts = PurePosixPath(path[len(folder) :].lstrip("/")).parts
    if any(_STARTED_FROM.fullmatch(part) for part in parts):
        return False
    *packages, file = parts
    name, _, ending = file.partition(".")
    if name == "__init__" and packages:
        name = packages.pop()
    return bool(packages) or name not in _MODULES or not re.fullmatch(r"(.*\.)?(py|so)", ending)


def _may_be_same(one: str, other: str) -> bool:
    """Whether two paths are of one file, if the working folder is the right one."""
    shorter, longer = sorted((PurePosixPath(one), PurePosixPath(other)), key=lambda p: len(p.parts))
    if shorter.is_absolute() or not longer.is_absolute():
        return shorter == longer
    return longer.parts[-len(shorter.parts) :] == shorter.parts


def _as_regex(pattern: str) -> str:
    parts = re.split(r"(\*\*|\*|\?|\[!?[^\]]+\])", pattern)
    known = {"**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(
        known.get(part)
        or (f"[^{part[2:]}" if part.startswith("[!") else part if n % 2 else re.escape(part))
        for n, part in enumerate(parts)
    )
