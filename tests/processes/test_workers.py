"""Worker processes end with their trainer, and clean up when they are interrupted."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tests.waiting import is_alive, wait_until

from inspect_tinker_plugin.processes.workers import worker_pool


async def _work(started: Path, cleaned: Path) -> None:
    try:
        await asyncio.to_thread(started.write_text, str(os.getpid()))
        await asyncio.sleep(60)
    finally:
        await asyncio.to_thread(cleaned.touch)


def work(started: Path, cleaned: Path) -> None:
    asyncio.run(_work(started, cleaned))


def wait_until_there(path: Path) -> None:
    wait_until(lambda: path.exists() and (path.stat().st_size or path.name == "cleaned"))


def wait_until_gone(pid: int) -> None:
    wait_until(lambda: not is_alive(pid))


def light_pool() -> AbstractContextManager[ProcessPoolExecutor]:
    """A pool of one worker, which does not load what rollouts need."""
    return worker_pool(1, loading="asyncio")


@pytest.mark.slow
def test_calls_run_in_other_processes_that_are_gone_afterwards() -> None:
    with worker_pool(2) as pool:
        pids = {pool.submit(os.getpid).result(60) for _ in range(4)}
    assert os.getpid() not in pids
    assert not any(map(is_alive, pids))


def test_leaving_the_block_interrupts_what_runs(tmp_path: Path) -> None:
    started, cleaned = tmp_path / "started", tmp_path / "cleaned"
    with light_pool() as pool:
        future: Future[None] = pool.submit(work, started, cleaned)
        wait_until_there(started)
    assert cleaned.exists()
    assert not is_alive(int(started.read_text()))
    assert future.done()


def test_workers_of_a_background_job_heed_its_end_but_no_ctrl_c(
    tmp_path: Path,
) -> None:
    started, cleaned = tmp_path / "started", tmp_path / "cleaned"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with light_pool() as pool:
            pool.submit(work, started, cleaned)
            wait_until_there(started)
            os.kill(int(started.read_text()), signal.SIGINT)
            time.sleep(0.5)
            assert not cleaned.exists()
    finally:
        signal.signal(signal.SIGINT, before)
    assert cleaned.exists()


def test_calls_that_were_sent_ahead_are_not_begun_any_more(tmp_path: Path) -> None:
    with light_pool() as pool:
        pool.submit(work, tmp_path / "first", tmp_path / "cleaned")
        pool.submit(work, tmp_path / "second", tmp_path / "second-cleaned")
        wait_until_there(tmp_path / "first")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cleaned", "first"]


def test_a_worker_that_waits_ignores_ctrl_c_and_ends_quietly_by_another_signal(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with light_pool() as pool:
        pid = pool.submit(os.getpid).result(60)
        os.kill(pid, signal.SIGINT)
        time.sleep(0.5)
        assert pool.submit(os.getpid).result(60) == pid
        os.kill(pid, signal.SIGTERM)  # it may still be sending its result
        with pytest.raises((BrokenProcessPool, KeyboardInterrupt)):
            pool.submit(time.sleep, 600).result(60)
        wait_until_gone(pid)
    assert capfd.readouterr().err == ""


class Heavy:
    """A result that takes a while to be sent."""

    def __init__(self, sending: Path) -> None:
        self.sending = sending

    def __reduce__(self) -> tuple[type[int], tuple[()]]:
        self.sending.write_text("now")
        time.sleep(1)
        return int, ()


def test_a_worker_that_is_told_to_end_while_it_sends_a_result_ends(tmp_path: Path) -> None:
    with light_pool() as pool:
        pid = pool.submit(os.getpid).result(60)
        pool.submit(Heavy, tmp_path / "sending")
        wait_until_there(tmp_path / "sending")
        os.kill(pid, signal.SIGTERM)
        wait_until_gone(pid)


def test_a_signal_to_all_processes_interrupts_workers_too(tmp_path: Path) -> None:
    """As a supervisor sends it to every process of a service."""
    started, cleaned = tmp_path / "started", tmp_path / "cleaned"
    with light_pool() as pool:
        pool.submit(work, started, cleaned)
        wait_until_there(started)
        os.kill(int(started.read_text()), signal.SIGTERM)
        wait_until_there(cleaned)


def test_a_worker_whose_trainer_was_killed_cleans_up_and_ends(tmp_path: Path) -> None:
    started, cleaned = tmp_path / "started", tmp_path / "cleaned"
    script = tmp_path / "trainer.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.processes.test_workers import light_pool, work\n"
        "if __name__ == '__main__':\n"
        "    with light_pool() as pool:\n"
        "        pool.submit(work, Path(sys.argv[1]), Path(sys.argv[2])).result()\n"
    )
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), str(root / "src"), *sys.path])
    trainer = subprocess.Popen(
        [sys.executable, str(script), str(started), str(cleaned)],
        env={**os.environ, "PYTHONPATH": path},
    )
    wait_until_there(started)
    worker = int(started.read_text())
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    wait_until_there(cleaned)
    wait_until_gone(worker)
