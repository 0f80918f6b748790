"""Runs an example of the gallery, and shows its curve beside the expected one, if there is one.

    python -m examples boxes [FOLDER] [--record]

With ``--record``, the run becomes the expected one: its rewards, curve and report are kept in
``examples/NAME``.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.curves import draw
from inspect_tinker_plugin.train.history import REWARD, read_steps

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
LINK_TO_FILE = re.compile(r'<a href="(?![a-z]+:|#)[^"]*"[^>]*>(.*?)</a>', re.DOTALL)


@dataclass(frozen=True)
class Example:
    """The commands of an example, and what they leave; ``OUT`` stands for the folder."""

    commands: Sequence[str]
    runs: Mapping[str, str]
    """Names of the trainings, and their folders."""
    pages: Mapping[str, str]
    """Pages that are kept, and where they are written."""


SPELLING = "examples/mended/spelling.py"
AUDIT = f"inspect rl audit {SPELLING}@TASK --samples 4 --fail-on never --out OUT/audit-TASK"
EVAL = f"inspect eval {SPELLING}@mended --model tinker/OUT/TASK --limit 16 --display plain"
BOTH = ("flawed", "mended")

EXAMPLES = {
    "letters": Example(
        ["inspect rl train example_tasks/toy.py@letters --local --log-dir OUT/run"],
        {"letters": "run"},
        {"report.html": "run/report.html"},
    ),
    "boxes": Example(
        ["python -W ignore -m example_tasks.train_boxes OUT"],
        {"boxes": "run"},
        {"report.html": "run/report.html"},
    ),
    "diary": Example(
        ["python -W ignore -m example_tasks.train_diary OUT"],
        {"diary": "run"},
        {"report.html": "run/report.html"},
    ),
    "mended": Example(
        [
            *(AUDIT.replace("TASK", task) for task in BOTH),
            *(f"python -W ignore -m examples.mended.train OUT {task}" for task in BOTH),
            *(f"{EVAL.replace('TASK', task)} --log-dir OUT/evals" for task in BOTH),
        ],
        {task: task for task in BOTH},
        {f"{task}-{page}.html": f"{place}{page}.html" for task in BOTH
         for page, place in (("report", f"{task}/"), ("audit", f"audit-{task}/"))},
    ),
}  # fmt: skip


def rewards(run: Path) -> list[float]:
    """Return the mean reward of each step of a run."""
    return [row[REWARD] for row in read_steps(run).values() if REWARD in row]


def main() -> None:
    """Read the command line, run the example, and compare it."""
    parser = argparse.ArgumentParser(prog="python -m examples", description=__doc__)
    parser.add_argument("name", choices=EXAMPLES)
    parser.add_argument("folder", nargs="?", type=Path, help="out/examples/NAME by default")
    parser.add_argument("--record", action="store_true", help="make this the expected run")
    given = parser.parse_args()
    example, own = EXAMPLES[given.name], HERE / given.name
    folder: Path = given.folder or Path("out/examples", given.name)
    folder.mkdir(parents=True, exist_ok=True)
    for line in example.commands:
        command = line.replace("OUT", str(folder))
        print(f"$ {command}", flush=True)
        program, *arguments = shlex.split(command)
        if code := subprocess.run([BIN / program, *arguments]).returncode:
            sys.exit(code)
    curves = {name: rewards(folder / run) for name, run in example.runs.items()}
    if given.record:
        keep(example, folder, own)
        shown = {name: [round(each, 4) for each in curve] for name, curve in curves.items()}
        (own / "expected.json").write_text(json.dumps(shown, indent=1) + "\n")
        (own / "curve.svg").write_text(draw(shown, {}))
    record = own / "expected.json"
    expected = json.loads(record.read_text()) if record.exists() else {}
    drawn = draw(expected, curves) if expected else draw(curves, {})
    (folder / "curve.svg").write_text(drawn)
    print()
    for name, curve in curves.items():
        beside = f"; expected {span(expected[name])}" if name in expected else ""
        print(f"{name}: reward {span(curve)}{beside}")
    print(f"the curve: {folder / 'curve.svg'}")


def span(curve: Sequence[float]) -> str:
    """Return the first and the last reward of a run in words."""
    return f"{curve[0]:.2f} -> {curve[-1]:.2f} in {len(curve)} steps"


def keep(example: Example, folder: Path, own: Path) -> None:
    """Copy a run's pages, without links to its logs and paths of the machine that it ran on."""
    for name, page in example.pages.items():
        text = (folder / page).read_text(encoding="utf-8").replace(f"{Path.cwd()}/", "")
        (own / name).write_text(LINK_TO_FILE.sub(r"\1", text), encoding="utf-8")


if __name__ == "__main__":
    main()
