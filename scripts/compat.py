"""Runs contract tests and parity over releases of Inspect and of the cookbook: `make compat`.

Each release is installed without its dependencies into a folder of its own, which is put before
the environment's own packages; what it asks for and does not find there is said beside its result.
So fifteen releases of Inspect need one environment, and a release whose requirements an index
cannot meet is tried all the same.

Each result is kept as soon as it is there, with a digest of the source. A run that was stopped
continues: a release is tried again only if the package or its tests have changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distributions, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from inspect_tinker_plugin.inspect_internals.releases import TRIED

ROOT = Path(__file__).parents[1]
FOLDERS = Path(sys.prefix) / "compat"
KEPT = FOLDERS / "results.jsonl"
PAGE = ROOT / "docs" / "compatibility.md"
TABLE = re.compile(r"(?<=<!-- make compat -->\n).*?(?=<!-- end -->)", re.DOTALL)
NEWEST = "newest"

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
CONTRACT = ["tests/contract", "tests/test_inspect_internals.py"]
# Tests that use the cookbook's own classes, or its renderers as fixtures.
COOKBOOK = [*CONTRACT, "tests/rl", "tests/tokens", "tests/faults", "tests/logs"]


@dataclass(frozen=True)
class Row:
    """The result of one release."""

    name: str
    release: str
    tests: str
    parity: str
    asks_for: Sequence[str]
    passed: bool

    def __str__(self) -> str:
        notes = "; ".join(self.asks_for)
        return f"| `{self.name}` {self.release} | {self.tests} | {self.parity} | {notes} |"


def releases(name: str) -> list[str]:
    """Return the supported releases in the index, newest first."""
    shown = subprocess.run(
        [*PIP, "index", "versions", name], capture_output=True, text=True, check=True
    ).stdout
    available = re.search(r"Available versions: (.*)", shown)
    assert available is not None, shown
    oldest, newest = TRIED[name]
    return [
        each
        for each in available[1].split(", ")
        if Version(oldest) <= Version(each) <= Version(newest)
    ]


def _folder(name: str, release: str) -> Path:
    return FOLDERS / f"{name}-{release}"


def install(name: str, release: str) -> None:
    """Install a release, without its dependencies, into its folder."""
    folder = _folder(name, release)
    if release == NEWEST:
        shutil.rmtree(folder, ignore_errors=True)
    if not folder.exists():
        wanted = name if release == NEWEST else f"{name}=={release}"
        command = [*PIP, "install", "-qq", "--no-deps", "--target", str(folder), wanted]
        subprocess.run(command, check=True)


def unmet(folder: Path) -> Iterator[str]:
    """Return the requirements of the release in a folder that the environment does not meet."""
    found: Distribution
    [found] = distributions(path=[str(folder)])
    for line in found.requires or []:
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            there = version(wanted.name)
        except PackageNotFoundError:
            there = "none"
        if there == "none" or Version(there) not in wanted.specifier:
            yield f"asks for `{wanted}`, ran with {there}"


def run(folder: Path, *command: str) -> tuple[bool, str]:
    """Run Python with the folder first on its path; return its verdict and its output."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "src")]),
            "INSPECT_RL_UNCHECKED": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode == 0, done.stdout.strip()


COUNTS = r"\d+ (?:passed|failed|error).*?(?= in )"
"""What pytest says at its end."""


def try_release(name: str, release: str, *, docker: bool) -> Row:
    """Run contract tests and parity with one release."""
    folder = _folder(name, release)
    [found] = distributions(path=[str(folder)])
    paths = COOKBOOK if name == "tinker-cookbook" else CONTRACT
    marks = "not slow and not long and not docker and not local and not ray"
    options = ["-q", "-p", "no:cacheprovider", "-m", marks]
    tests, said = run(folder, "-m", "pytest", *options, *paths)
    options[-1] = marks if not docker else marks.replace(" and not docker", "")
    parity, table = run(folder, "-m", "pytest", *options, "tests/parity/test_corpus.py")
    if not tests:
        print(said)
    if not parity:
        print(table)
    return Row(
        name=name,
        release=found.version,
        tests=_last(said, COUNTS),
        parity=_last(table, COUNTS),
        asks_for=list(unmet(folder)),
        passed=tests and parity,
    )


def _last(said: str, pattern: str) -> str:
    found = re.findall(pattern, said)
    return found[-1] if found else said.splitlines()[-1] if said else "nothing"


def source() -> str:
    """Return a digest of the package and of the tests, by which a result can be used again."""
    digest = hashlib.sha256()
    for folder in ("src", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def read_kept(shown_of: str) -> dict[tuple[str, str], Row]:
    """Return the results kept from earlier runs, the latest of each release."""
    rows: dict[tuple[str, str], Row] = {}
    for line in KEPT.read_text(encoding="utf-8").splitlines() if KEPT.is_file() else ():
        found = json.loads(line)
        if found.pop("source") == shown_of:
            row = Row(**found)
            rows[row.name, row.release] = row
    return rows


def keep(row: Row, shown_of: str) -> None:
    """Keep a result."""
    with KEPT.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**asdict(row), "source": shown_of}) + "\n")


def _sorted(rows: Iterable[Row]) -> list[Row]:
    newest_first = sorted(rows, key=lambda row: Version(row.release), reverse=True)
    return sorted(newest_first, key=lambda row: row.name)


def page(rows: Sequence[Row]) -> str:
    """Return the documentation page with these rows in its table."""
    lines = ["| release | tests | parity | notes |", "| --- | --- | --- | --- |", *map(str, rows)]
    table = "\n".join(["", *lines, "", ""])
    return TABLE.sub(lambda _: table, PAGE.read_text(encoding="utf-8"))


def main() -> int:
    """Read the command line, try the releases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, prog="compat")
    parser.add_argument("only", nargs="*", metavar="NAME=RELEASE", help=f"or NAME={NEWEST}")
    parser.add_argument("--docker", action="store_true", help="with the parity cases of Docker")
    parser.add_argument("--jobs", type=int, default=1, help="releases at once")
    parser.add_argument("--again", action="store_true", help="also what was tried before")
    parser.add_argument("--write", action="store_true", help=f"keep the table in {PAGE.name}")
    args = parser.parse_args()
    wanted = [each.partition("=")[::2] for each in args.only] or [
        (name, release) for name in TRIED for release in releases(name)
    ]
    FOLDERS.mkdir(exist_ok=True)
    shown_of = source()
    before = {} if args.again else read_kept(shown_of)

    def result(name: str, release: str) -> Row:
        if (row := before.get((name, release))) is None:
            row = try_release(name, release, docker=args.docker)
            keep(row, shown_of)
        return row

    for name, release in wanted:
        install(name, release)
    rows = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for row in pool.map(lambda each: result(*each), wanted):
            rows.append(row)
            print(row, flush=True)
            if args.write:
                PAGE.write_text(page(_sorted(read_kept(shown_of).values())), encoding="utf-8")
    bad = [f"{row.name} {row.release}" for row in rows if not row.passed]
    print(f"{len(rows)} releases, {len(rows) - len(bad)} pass", *bad, sep="; ")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
