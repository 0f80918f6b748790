"""Refreshes the locked set-up and prints what changed: `make update`.

Two files hold it. `uv.lock` is what uv resolves, with the hashes of PyPI's files, for `uv sync`.
`constraints.txt` is written from it, one line per distribution, for pip. `--check` changes
neither, and fails when they are not in step with `pyproject.toml` and with each other.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from uv import find_uv_bin

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "uv.lock"
CONSTRAINTS = ROOT / "constraints.txt"

HEADER = """\
# Written by scripts/update_lock.py from uv.lock, for pip: what the tests ran against, one line per
# distribution. `make setup` installs with it. Used here and in CI only; users elsewhere are free to
# choose within the ranges of pyproject.toml.
"""

# The lock names the public index, whichever index this machine installs from.
PUBLIC_INDEX = ["--no-config", "--default-index", "https://pypi.org/simple"]
EXPORT = [
    "--all-extras",
    "--no-extra=verifiers",
    "--no-emit-project",
    "--no-hashes",
    "--no-header",
    "--no-annotate",
]


def uv(*args: str) -> str:
    """Run uv in the project, and return what it prints."""
    done = subprocess.run(
        [find_uv_bin(), *args], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"uv {args[0]} failed:\n{done.stderr.strip()}")
    return done.stdout


def written_from_lock() -> str:
    """Return the `constraints.txt` that follows from the lock."""
    return HEADER + uv("export", "--frozen", "--quiet", "--no-config", *EXPORT)


def locked(lock: str) -> dict[str, list[str]]:
    """Return the versions by distribution; some have several, for several Pythons."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for package in tomllib.loads(lock)["package"]:
        if "version" in package:  # the project's own comes from its tag
            found[package["name"]].append(package["version"])
    return {name: sorted(versions) for name, versions in found.items()}


def changes(before: Mapping[str, Sequence[str]], after: Mapping[str, Sequence[str]]) -> list[str]:
    """Return one line per distribution that was added, removed or has another version."""
    return [
        f"  {name:<32} {' / '.join(before.get(name, ['-'])):>16}  ->  "
        f"{' / '.join(after.get(name, ['-']))}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]


def update(*, upgrade: bool) -> None:
    """Write both files again, with the newest releases or only as far as pyproject.toml asks."""
    before = locked(LOCK.read_text(encoding="utf-8")) if LOCK.exists() else {}
    uv("lock", *PUBLIC_INDEX, *(["--upgrade"] if upgrade else []))
    CONSTRAINTS.write_text(written_from_lock(), encoding="utf-8")
    changed = changes(before, locked(LOCK.read_text(encoding="utf-8")))
    print("\n".join([f"{len(changed)} of the locked distributions changed", *changed]))


def check() -> int:
    """Compare the three files: 0 if they agree."""
    uv("lock", "--check", *PUBLIC_INDEX)
    if CONSTRAINTS.read_text(encoding="utf-8") == written_from_lock():
        return 0
    print("constraints.txt is not what uv.lock says: run `make update`", file=sys.stderr)
    return 1


def main() -> int:
    """Read the command line, and update or check."""
    parser = argparse.ArgumentParser(description="Refresh the locked set-up.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail when stale")
    parser.add_argument(
        "--keep", action="store_true", help="only what pyproject.toml asks for; upgrade nothing"
    )
    args = parser.parse_args()
    if args.check:
        return check()
    update(upgrade=not args.keep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
