"""The tests of engines run in one worker, and what tests start heeds signals."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETTINGS = """
[pytest]
markers =
    docker: needs an engine
"""
SAME = """
from tests.conftest import heeded_signals, pytest_collection_modifyitems, pytest_itemcollected
"""
GROUPED = """
import os, time
from pathlib import Path

import pytest

@pytest.mark.docker
@pytest.mark.parametrize("number", range(6))
def test_with_an_engine(number):
    time.sleep(0.1)
    Path(os.environ["PYTEST_XDIST_WORKER"]).touch()
"""
SIGNALS = '''
import subprocess, sys

ASK = """
from signal import *
print(getsignal(SIGINT) is default_int_handler, getsignal(SIGHUP) == SIG_DFL)
"""

def test_what_a_program_inherits():
    said = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True).stdout
    assert said.split() == ["True", "True"]
'''


def ignore_signals() -> None:
    """Do as ``nohup`` and the shell do for what runs in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def run_tests(folder: Path, tests: str, *options: str) -> None:
    for name, text in {
        "pytest.ini": SETTINGS,
        "conftest.py": f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{SAME}",
        "test_it.py": tests,
    }.items():
        (folder / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options],
        cwd=folder,
        preexec_fn=ignore_signals,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_tests_of_engines_share_a_worker(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    run_tests(tmp_path, GROUPED, "-n", "2", "--dist", "loadgroup")
    assert len(list(tmp_path.glob("gw*"))) == 1


@pytest.mark.parametrize("options", [[], ["-n", "1"]], ids=["here", "in-a-worker"])
def test_what_tests_start_heeds_signals_however_they_were_started(
    tmp_path: Path, options: list[str]
) -> None:
    run_tests(tmp_path, SIGNALS, *options)
