"""Tries releases of Inspect and of the cookbook that are newer than the tested ones, once each.

The package's own metadata allows releases newer than those that its tests ran against. With such a
release, the first task that is made ready for episodes starts a parity smoke test
(``testing/smoke.py``) in a separate process, which takes a few seconds. The verdict is remembered
for this pair of releases, in the user's cache folder. Names that Inspect no longer has are detected
earlier, on import (``inspect_internals/__init__.py``).
"""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version
from platformdirs import user_cache_path

from inspect_tinker_plugin.contracts.errors import VersionError

SUPPORTED_INSPECT = ">=0.3.270,<0.4"

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


def require_tried() -> None:
    """Check that the installed releases behave like the tested ones."""
    if os.environ.get(UNCHECKED, "") not in ("", "0"):
        return
    untried = [
        name
        for name, (oldest, newest) in TRIED.items()
        if find_spec(name.replace("-", "_"))
        is not None  # exports and audits go without the cookbook
        and not Version(oldest) <= Version(_version(name)) <= Version(newest)
    ]
    if untried and (reason := _find_difference(tuple(untried))) is not None:
        tested = " and ".join(f"{name}>={TRIED[name][0]},<={TRIED[name][1]}" for name in untried)
        raise VersionError(
            f"{_shown(untried)} was not tested with {PACKAGE} {_version(PACKAGE)}; "
            f"with it, episodes differ from evals: {reason}. Install {tested}, or "
            f"set {UNCHECKED}=1 to continue."
        )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # a source folder on the path
        return "0+unknown"


def _shown(names: list[str]) -> str:
    return " with ".join(f"{name} {_version(name)}" for name in names)


@functools.cache
def _find_difference(untried: tuple[str, ...]) -> str | None:
    """Return the remembered difference of the installed releases, or run a smoke test."""
    file = user_cache_path(PACKAGE) / "releases.json"
    releases = " ".join(f"{name}=={_version(name)}" for name in (*TRIED, PACKAGE))
    remembered = _read(file)
    if releases in remembered:
        return remembered[releases]
    _logger.warning(
        "%s is newer than what %s was tested with: comparing episodes with evals, once",
        _shown(list(untried)),
        PACKAGE,
    )
    reason, conclusive = _run_smoke_test()
    if conclusive:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({**remembered, releases: reason}, indent=1), "utf-8")
        except OSError as error:
            _logger.warning("cannot remember this in %s: %s", file, error)
    return reason


def _read(file: Path) -> dict[str, str | None]:
    try:
        return {str(key): reason for key, reason in json.loads(file.read_text("utf-8")).items()}
    except (OSError, ValueError, AttributeError):
        return {}  # missing, half written, or of another form: try again


def _run_smoke_test() -> tuple[str | None, bool]:
    """Return the difference that the smoke test finds, and whether another run would find it."""
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
            return f"the comparison did not end within {TIMEOUT} seconds", False
    if done.returncode == 0:
        return None, True
    # The first difference; or, if the comparison failed, the last line of a traceback.
    said = (done.stdout.strip() or done.stderr.strip()).splitlines()
    reason = said[-1].strip() if said else f"the comparison ended with {done.returncode}"
    return reason, done.returncode == DIFFERS
