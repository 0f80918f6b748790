"""Writes docs/catalogue.md: what `check` and `audit` say of the tasks of a package, offline.

    pip install inspect-evals
    python scripts/try_catalogue.py inspect_evals [--only NAME] [--minutes 30]

Every registered task is made in this process, which most cannot be without a download; those that
can be are checked and audited by the commands, each within a time limit.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from inspect_ai import Task

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "INSPECT_DISPLAY": "none"}
PAGE = Path(__file__).parents[1] / "docs" / "catalogue.md"
MAKING, COMMAND = 10, 600
"""Seconds to make a task, and for one command."""


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise a TimeoutError in code that takes longer."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not made within {seconds} seconds")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)  # again, where it is caught and tried again
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def names(package: str) -> list[str]:
    """Return the tasks that a package registers."""
    registered = vars(importlib.import_module(f"{package}._registry"))
    return [
        f"{package}/{name}"
        for name, value in sorted(registered.items())
        if inspect.isfunction(value)
        and inspect.signature(value).return_annotation in (Task, "Task")
    ]


def cannot_make(name: str) -> str | None:
    """Make a task, and return why that is not possible."""
    from inspect_tinker_plugin.tasks.reference import resolve_task

    try:
        quiet = io.StringIO()
        with limited(MAKING), contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            task = resolve_task(name).task
            if not len(task.dataset):
                return "an empty dataset"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return reason(f"{type(error).__name__}: {error}")
    return None


def reason(error: str) -> str:
    """Return an error as what it lacks, or in its own words."""
    text = " ".join(error.split())
    kinds = {
        "an image": ("docker", "services started"),
        "a key or a login": ("API_KEY", "gated", "credentials"),
        "a package": ("No module named", "ImportError", "install"),
        "a download": ("offline", "ConnectionError", "Connection", "HTTPSConnection", "resolve",
                       "LocalEntryNotFound", "URLError", "hub", "download", "Max retries", "gdown",
                       "https:"),
        "more than ten seconds": ("not made within",),
        "a repository": ("Command failed", "CalledProcessError"),
    }  # fmt: skip
    for kind, words in kinds.items():
        if any(word.lower() in text.lower() for word in words):
            return kind
    return text.rpartition("could not be created: ")[2][:100].replace("|", "\\|")


def command(*arguments: str) -> tuple[list[dict[str, Any]], str]:
    """Run ``inspect rl … --json``, and return its results, and why there are none."""
    line = [sys.executable, "-W", "ignore", "-m", "inspect_tinker_plugin", *arguments, "--json"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                line, cwd=folder, capture_output=True, text=True, timeout=COMMAND, check=False
            )
        except subprocess.TimeoutExpired:
            return [], f"not within {COMMAND} s"
    said = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    found, rest = [], done.stdout.strip()
    while rest:
        value, end = json.JSONDecoder().raw_decode(rest)
        found.append(value)
        rest = rest[end:].strip()
    return found, " ".join(said)[7:200].replace("|", "\\|")


def checked(name: str) -> str:
    """Check one sample of a task."""
    runs, error = command("check", name, "--limit", "1")
    if not runs:
        return error or "nothing was run"
    if any(run["missing_grader"] for run in runs):
        return "needs a grader"
    failed = {reason(run["both_failed"]) for run in runs if run["both_failed"]}
    if failed:
        return f"both sides fail: {', '.join(sorted(failed))}"
    return ", ".join(sorted({run["verdict"] for run in runs}))


def audited(name: str) -> str:
    """Audit two samples of a task with a small budget."""
    budget = ["--samples", "2", "--budget", "60", "--budget", "90s", "--fail-on", "never"]
    reports, error = command("audit", name, *budget)
    if not reports:
        return error or "nothing was run"
    codes = Counter(
        f"`{each['code']}` ({each['severity']})"
        for report in reports
        for each in report["findings"]
        if each["severity"] in ("high", "medium")
    )
    return ", ".join(codes) or "nothing grave"


def main() -> None:
    """Try every task, and write the page."""
    parser = argparse.ArgumentParser(description="Check and audit the tasks of a package.")
    parser.add_argument("package")
    parser.add_argument("--only", default="", help="tasks whose name contains this")
    parser.add_argument("--minutes", type=float, default=60, help="stop trying after this time")
    given = parser.parse_args()
    end = time.monotonic() + 60 * given.minutes
    reasons: Counter[str] = Counter()
    made: list[str] = []
    for name in names(given.package):
        if given.only in name:
            why = cannot_make(name)
            print(name, why or "is made", flush=True)
            if why is None:
                made.append(name)
            else:
                reasons[why] += 1

    def tried(name: str) -> str:
        if time.monotonic() > end:
            return f"| `{name}` | not tried | not tried |"
        row = f"| `{name}` | {checked(name)} | {audited(name)} |"
        print(row, flush=True)
        return row

    with ThreadPoolExecutor(2) as two:
        rows = list(two.map(tried, made))
    PAGE.write_text(page(given.package, rows, reasons), encoding="utf-8")


def page(package: str, rows: list[str], reasons: Counter[str]) -> str:
    """Return the page."""
    distribution = package.replace("_", "-")
    releases = f"`{distribution}` {version(distribution)} and `inspect-ai` {version('inspect-ai')}"
    table = "".join(f"{row}\n" for row in rows)
    why = "\n".join(f"| {each} | {count} |" for each, count in reasons.most_common())
    return f"""# The catalogue of {distribution}

What [`inspect rl check`](cli.md#inspect-rl-check) says of the first sample of each task that can
be made without a network, and [`inspect rl audit`](audit.md) of two samples, within 60 episodes.
Written by `scripts/try_catalogue.py` with {releases}.
Of a task that is `inconclusive`, the default replies reach no end; `--script` gives it others.

| task | check | findings, high and medium |
| --- | --- | --- |
{table}
The other {sum(reasons.values())} registered tasks could not be made here. They need:

| what | tasks |
| --- | --- |
{why}
"""


if __name__ == "__main__":
    main()
