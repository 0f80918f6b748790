"""Runs of ``inspect rl train`` in separate processes, as a user starts and stops them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from inspect_tinker_plugin.testing import tokenizer_path
from inspect_tinker_plugin.train.request import TrainRequest

ROOT = Path(__file__).parents[2]
TOY = ROOT / "example_tasks" / "toy.py"
MAIN = "from inspect_tinker_plugin.cli.main import main; main()"


@dataclass
class Run:
    """A training of a toy task on a local server."""

    process: subprocess.Popen[str]
    log_dir: Path

    @classmethod
    def start(cls, log_dir: Path, model: Path, *options: str, task: str = f"{TOY}@letters") -> Run:
        command = [sys.executable, "-W", "ignore", "-c", MAIN, "train", task, "--local"]
        command += ["--model", str(model), "--log-dir", str(log_dir), *options]
        log_dir.mkdir(parents=True, exist_ok=True)
        with (log_dir / "terminal.txt").open("a") as output:
            process = subprocess.Popen(
                command, env=environ(log_dir), stdout=output, stderr=subprocess.STDOUT, text=True
            )
        return cls(process, log_dir)

    @property
    def terminal(self) -> str:
        return (self.log_dir / "terminal.txt").read_text()

    def finish(self) -> None:
        """Wait for an orderly end."""
        assert self.process.wait(800) == 0, self.terminal

    def kill(self) -> None:
        """Kill the trainer, and wait until nothing of the run is left."""
        family = self.family()
        self.process.kill()
        self.process.wait()
        assert_gone(family)

    def family(self) -> list[psutil.Process]:
        """All processes of the run: trainer, server, engine, workers."""
        trainer = psutil.Process(self.process.pid)
        return [trainer, *trainer.children(recursive=True)]

    def wait_until(self, condition: Callable[[], bool], seconds: float = 400) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.terminal
            assert time.monotonic() < deadline, self.terminal
            time.sleep(0.05)

    def wait_for_steps(self, count: int) -> None:
        self.wait_until(lambda: len(steps(self.log_dir)) >= count)


class Started(AssertionError):
    """The server would have been started."""


def toy_request(log_dir: Path, **changes: Any) -> TrainRequest:
    fields: dict[str, Any] = {
        "task": f"{TOY}@letters",
        "local": True,
        "model": str(tokenizer_path()),
        "log_dir": log_dir,
        "say": lambda line: None,
        **changes,
    }
    return TrainRequest(**fields)


def environ(log_dir: Path) -> dict[str, str]:
    """Variables of a process that trains: the sources are these."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        "INSPECT_LOG_DIR": str(log_dir / "evals"),
    }


def assert_gone(processes: list[psutil.Process], seconds: float = 30) -> None:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    left = [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
    assert not left, left


def rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    whole = [line for line in path.read_text().split("\n")[:-1] if line]
    return [json.loads(line) for line in whole]


def steps(log_dir: Path) -> list[int]:
    """Numbers of the steps that were done, repeated ones repeatedly."""
    found = rows(log_dir / "metrics.jsonl")
    return [row["step"] for row in found if "env/all/reward/total" in row]


def rewards(log_dir: Path) -> list[float]:
    last = {
        row["step"]: row["env/all/reward/total"]
        for row in rows(log_dir / "metrics.jsonl")
        if "env/all/reward/total" in row
    }
    return [last[step] for step in sorted(last)]


def quarters(log_dir: Path) -> tuple[float, float]:
    """Mean reward of the first and of the last quarter."""
    values = rewards(log_dir)
    size = max(1, len(values) // 4)
    return sum(values[:size]) / size, sum(values[-size:]) / size


def logged_batches(folder: Path) -> list[int]:
    found = (re.search(r"batch-(\d+)_", path.name) for path in sorted(folder.glob("*.eval")))
    return [int(match[1]) for match in found if match]
