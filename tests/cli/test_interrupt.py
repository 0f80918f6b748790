"""Ctrl-C: exit code 130, and finished results are shown; the same for SIGTERM, with 143."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.commands import Command
from tests.packages import run

TASKS = """
import asyncio
from pathlib import Path
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate, solver

@solver
def quick_then_slow():
    async def solve(state, generate):
        if state.sample_id != "quick":
            Path("slow").touch()
            await asyncio.sleep(300)
        return await generate(state)
    return solve

@task
def some():
    samples = [Sample(id=name, input="?", target="x") for name in ("quick", "slow", "slower")]
    return Task(dataset=samples, solver=[quick_then_slow(), generate()], scorer=match())
"""


def interrupted(
    folder: Path,
    *args: str,
    by: signal.Signals = signal.SIGINT,
    ignoring: signal.Signals | None = None,
    tasks: str = TASKS,
) -> subprocess.CompletedProcess[str]:
    """Run a command until its first slow sample has begun, and press Ctrl-C."""
    (folder / "tasks.py").write_text(tasks)
    command = Command(*args, cwd=folder, ignoring=ignoring)
    command.wait_until((folder / "slow").exists)
    command.send(by)
    return command.wait()


@pytest.mark.forks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("by", "ignoring"),
    [
        pytest.param(signal.SIGINT, None, id="Ctrl-C"),
        pytest.param(signal.SIGTERM, signal.SIGINT, id="SIGTERM", marks=pytest.mark.nightly),
        pytest.param(signal.SIGHUP, None, id="SIGHUP", marks=pytest.mark.nightly),
    ],
)
def test_a_signal_shows_the_groups_that_are_finished(
    tmp_path: Path, by: signal.Signals, ignoring: signal.Signals | None
) -> None:
    options = ("--limit", "3", "--group-size", "2", "--json")
    done = interrupted(tmp_path, "rollout", "tasks.py", *options, by=by, ignoring=ignoring)
    assert done.returncode == 128 + by, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(each["sample_id"], each["number"]) for each in reports] == [("quick", 1), ("quick", 2)]
    assert "Interrupted after 2 of 6 rollouts." in done.stderr


SLOWLY_MADE = """
import time
from pathlib import Path
from inspect_ai import Task, task

@task
def some():
    Path("slow").touch()
    time.sleep(30)
    Path("made").touch()
    return Task()
"""


@pytest.mark.forks
@pytest.mark.slow
@pytest.mark.parametrize("name", ["check", pytest.param("bench", marks=pytest.mark.nightly)])
def test_a_task_that_loads_for_long_does_not_hold_up_a_signal(name: str, tmp_path: Path) -> None:
    done = interrupted(tmp_path, name, "tasks.py", tasks=SLOWLY_MADE)
    assert done.returncode == 128 + signal.SIGINT, done.stderr
    assert not (tmp_path / "made").exists()


@pytest.mark.slow
def test_an_ignored_signal_stays_ignored_and_a_repeated_one_changes_nothing() -> None:
    program = (
        "import os, signal, sys\n"
        "from inspect_tinker_plugin.processes.workers import stopped_like_ctrl_c\n"
        "with stopped_like_ctrl_c() as stopped:\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    print('alive', stopped.by)\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    except KeyboardInterrupt:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)  # from `timeout`, once more\n"
        "        print(stopped.by.name)\n"
        "print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)\n"
    )
    command = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh", sys.executable, "-c", program]
    assert run(*command).split() == ["alive", "None", "SIGTERM", "True"]


CLOSED_TERMINAL = """
import os, pty, signal, click
from inspect_tinker_plugin.cli.reporting import reported

@click.command()
@reported
def waits():
    terminal, ours = pty.openpty()
    os.dup2(ours, 1)
    os.dup2(ours, 2)
    os.close(terminal)
    os.kill(os.getpid(), signal.SIGHUP)

waits()
"""


@pytest.mark.slow
def test_a_terminal_that_is_closed_ends_a_command_as_its_signal_does() -> None:
    run(sys.executable, "-c", CLOSED_TERMINAL, code=128 + signal.SIGHUP)


def containers() -> set[str]:
    return set(run("docker", "ps", "-aq", "--no-trunc").split())


BOXED = """
import asyncio
from pathlib import Path
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate, solver
from inspect_ai.util import sandbox

@solver
def slow():
    async def solve(state, generate):
        name = (await sandbox().exec(["cat", "/etc/hostname"])).stdout.strip()
        Path(f"box-{name}").touch()
        Path("slow").touch()
        await asyncio.sleep(300)
    return solve

@task
def some():
    compose = "compose.yaml"
    return Task(dataset=[Sample(input="?", target="x")], solver=slow(), scorer=match(),
                sandbox=("docker", compose))
"""


@pytest.mark.forks
@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.parametrize("command", ["rollout", pytest.param("check", marks=pytest.mark.nightly)])
def test_a_signal_removes_the_containers_of_inspects_own_sandbox(
    tmp_path: Path, command: str
) -> None:
    (tmp_path / "compose.yaml").write_text(
        "services:\n  default:\n    image: inspect-rl-test/python:1\n    init: true\n"
        "    command: tail -f /dev/null\n    network_mode: none\n"
    )
    done = interrupted(tmp_path, command, "tasks.py", by=signal.SIGTERM, tasks=BOXED)
    assert done.returncode == 143, done.stderr
    boxes = [path.name.removeprefix("box-") for path in tmp_path.glob("box-*")]
    assert boxes
    assert not [each for each in containers() if each[:12] in boxes]


IN_A_LOOP = """
import asyncio, os, signal
from inspect_tinker_plugin.processes.workers import stopped_like_ctrl_c

signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a background job of a script

async def steps():
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(100_000):  # the signal is handled in here
        pass
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        print("cancelled between steps")
        raise

with stopped_like_ctrl_c():
    try:
        asyncio.run(steps())
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_a_signal_cuts_through_no_step_of_a_task_where_ctrl_c_is_ignored() -> None:
    said = run(sys.executable, "-c", IN_A_LOOP).splitlines()
    assert said == ["cancelled between steps", "interrupted"]


STARTING_A_COMMAND = """
import asyncio, os, signal, sys
from asyncio.subprocess import PIPE
from inspect_tinker_plugin.processes.workers import run_in_loop, stopped_like_ctrl_c

signal.signal(signal.SIGINT, signal.SIG_IGN)

async def start(steps):
    starting = asyncio.create_task(
        asyncio.create_subprocess_exec("sleep", "60", stdout=PIPE, stderr=PIPE)
    )
    for _ in range(steps):
        await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        await starting
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        print("cancelled")
        raise

for steps in range(1, 6):
    with stopped_like_ctrl_c():
        try:
            run_in_loop(start(steps))
        except KeyboardInterrupt:
            print("interrupted")
"""


def test_a_signal_ends_a_loop_in_which_a_command_is_just_being_started() -> None:
    said = run(sys.executable, "-c", STARTING_A_COMMAND).splitlines()
    assert said == ["cancelled", "interrupted"] * 5


PRESSED_TWICE = """
import asyncio, os, signal
from inspect_tinker_plugin.processes.workers import run_in_loop

async def clean_up():
    await asyncio.sleep(0.3)
    print("cleaned up")

async def work():
    os.kill(os.getpid(), signal.SIGINT)
    try:
        await asyncio.sleep(60)
    finally:
        cleaning = asyncio.create_task(clean_up())
        os.kill(os.getpid(), signal.SIGINT)
        while not cleaning.done():  # as a task group of anyio waits
            try:
                await asyncio.wait([cleaning])
            except asyncio.CancelledError:
                print("cancelled again")

try:
    run_in_loop(work())
except KeyboardInterrupt:
    print("interrupted", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


def test_a_second_ctrl_c_cancels_again_and_cuts_off_nothing_else() -> None:
    said = run(sys.executable, "-c", PRESSED_TWICE).splitlines()
    assert said == ["cancelled again", "cleaned up", "interrupted True"]


UNCANCELLED = """
import anyio, asyncio, os, signal
from inspect_tinker_plugin.processes.workers import run_in_loop

async def outlast(stopping):
    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await stopping.wait()

async def work():
    stopping = asyncio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(outlast, stopping)
        await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await anyio.sleep_forever()
        finally:
            stopping.set()

try:
    run_in_loop(work())
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_cancellation_that_anyio_takes_back_interrupts() -> None:
    assert run(sys.executable, "-c", UNCANCELLED) == "interrupted\n"


HANGING = """
import os, signal, threading, time
from inspect_tinker_plugin.processes.workers import run_in_loop

def press():
    while True:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)

async def work():
    threading.Thread(target=press, daemon=True).start()
    while True:
        time.sleep(0.01)

try:
    run_in_loop(work())
except KeyboardInterrupt:
    os._exit(7)
"""


def test_ctrl_c_ends_a_loop_that_hangs() -> None:
    run(sys.executable, "-c", HANGING, code=7)
