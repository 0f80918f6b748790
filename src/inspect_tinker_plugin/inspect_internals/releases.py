"""Tries releases of Inspect and of the cookbook that are newer than the tested ones, once each.

The package's own metadata allows releases newer than those that its tests ran against. With
such a release, the first task that is made ready for episodes starts a parity smoke test
(``testing/smoke.py``) in a separate process, which takes a few seconds. The verdict is
remembered for this pair of releases, in the user's cache folder. Names that Inspect no longer has
are detected earlier, on import (``inspect_internals/names.py``).
"""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from packaging.version import Version
from platformdirs import user_cache_path

from inspect_tinker_plugin.contracts.errors import VersionError

TRIED = {"inspect-ai": ("0.3.270", "0.3.285"), "tinker-cookbook": ("0.5.8", "0.6.1")}
"""Oldest and newest release that the tests ran against (``docs/compatibility.md``)."""

UNCHECKED = "INSPECT_RL_UNCHECKED"
"""Set to ``1``, this environment variable lets any release pass untried."""

PACKAGE = "inspect-tinker-plugin"
SMOKE_TEST = [sys.executable, "-W", "ignore", "-m", "inspect_tinker_plugin.testing.smoke"]
DIFFERS = 1
"""Its exit code for a difference, and Python's own for failing imports or calls."""

TIMEOUT = 300
"""Seconds after which a smoke test is inconclusive; it normally takes a few."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    """The result of a smoke test; there is a reason if episodes and evals disagreed."""

    reason: str | None = None


def require_tried() -> None:
    """Check that the installed releases behave like the tested ones.

    Raises:
        VersionError: A release that is not among the tested ones behaves differently.
    """
    if os.environ.get(UNCHECKED, "") not in ("", "0"):
        return
    if names := _untried():
        reason = _verdict().reason
        if reason is not None:
            raise VersionError(
                f"{_shown(names)} was not tested with {PACKAGE} {_version(PACKAGE)}; "
                f"with it, episodes differ from evals: {reason}. Install {_tested(names)}, or "
                f"set {UNCHECKED}=1 to continue."
            )


def _untried() -> list[str]:
    """Return the dependencies that are outside the tested releases."""
    return [
        name
        for name, (oldest, newest) in TRIED.items()
        if not Version(oldest) <= Version(_version(name)) <= Version(newest)
    ]


@functools.cache
def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # a source folder on the path
        return "0+unknown"


def _shown(names: list[str]) -> str:
    return " with ".join(f"{name} {_version(name)}" for name in names)


def _tested(names: list[str]) -> str:
    return " and ".join(f"{name}>={TRIED[name][0]},<={TRIED[name][1]}" for name in names)


@functools.cache
def _verdict() -> Verdict:
    """Return the remembered verdict on the installed releases, or run a smoke test."""
    file = user_cache_path("inspect-tinker-plugin") / "releases.json"
    key = " ".join(_identity(name) for name in (*TRIED, PACKAGE))
    remembered = _read(file)
    if key not in remembered:
        _logger.warning(
            "%s is newer than what %s was tested with: comparing episodes with evals, once",
            _shown(_untried()),
            PACKAGE,
        )
        verdict, conclusive = _smoke_test()
        if not conclusive:
            return verdict
        # another process may have written meanwhile
        remembered = {**_read(file), key: verdict}
        _write(file, remembered)
    return remembered[key]


def _identity(name: str) -> str:
    """Return name and version; for copies and development trees also place and time of change."""
    try:
        folder = Path(str(distribution(name).locate_file("")))
    except PackageNotFoundError:
        return f"{name}=={_version(name)}"
    source = folder / name.replace("-", "_")
    changed = source.stat().st_mtime_ns if source.exists() else 0
    return f"{name}=={_version(name)}@{folder}:{changed}"


def _smoke_test() -> tuple[Verdict, bool]:
    """Run the smoke test.

    Returns:
        The verdict, and whether another run would give the same.
    """
    environment = {
        **os.environ,
        UNCHECKED: "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    with tempfile.TemporaryDirectory(prefix="inspect-rl-smoke-") as folder:
        try:
            done = subprocess.run(
                SMOKE_TEST,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Verdict(f"the comparison did not end within {TIMEOUT} seconds"), False
    if done.returncode == 0:
        return Verdict(), True
    # The first difference; or, if the comparison failed, the last line of a traceback.
    said = (done.stdout.strip() or done.stderr.strip()).splitlines()
    reason = said[-1].strip() if said else f"the comparison ended with {done.returncode}"
    return Verdict(reason), done.returncode == DIFFERS


def _read(file: Path) -> dict[str, Verdict]:
    try:
        return {key: Verdict(**found) for key, found in json.loads(file.read_text("utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # missing, or written by another release: try again


def _write(file: Path, remembered: dict[str, Verdict]) -> None:
    text = json.dumps({key: asdict(verdict) for key, verdict in remembered.items()}, indent=1)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as part:
            part.write(text)
        os.replace(part.name, file)
    except OSError as error:
        _logger.warning("cannot remember this in %s: %s", file, error)
