"""Start, stop and loss of the server: nothing keeps running, and errors say what to do."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.waiting import wait_until

from tinker_local import LocalConfigError, LocalServer, LocalServerError, LocalSettings

needs_local = pytest.mark.local

STARTER = """
import sys, time
from tinker_local import LocalServer
with LocalServer(sys.argv[1], state_dir=sys.argv[2]) as server:
    print(server.pid, server.url, flush=True)
    time.sleep(600)
"""


def group_members(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def wait_until_empty(group: int, seconds: float = 60) -> None:
    wait_until(lambda: not group_members(group), seconds)


def check_for(server: LocalServer, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        server.check()
        time.sleep(0.1)


@contextmanager
def starter(model: Path, state: Path) -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """A process that runs a server in a `with` block, with the server's group and URL."""
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, str(model), str(state)],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            group, url = process.stdout.readline().split()
            yield process, int(group), url
        finally:
            process.kill()


@pytest.mark.nightly
@needs_local
async def test_work_ends_with_the_server_that_it_uses(tiny_model: Path, tmp_path: Path) -> None:
    """Its clients would try for minutes."""

    async def work(seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
        finally:
            (tmp_path / "cleaned").touch()
        return "done"

    with LocalServer(tiny_model, state_dir=tmp_path / "state") as server:
        assert await server.during(work(0.1)) == "done"
        (tmp_path / "cleaned").unlink()
        working = asyncio.ensure_future(server.during(work(300)))
        await asyncio.sleep(0.1)
        assert server.pid is not None
        os.killpg(server.pid, signal.SIGKILL)
        with pytest.raises(LocalServerError, match="has ended"):
            await asyncio.wait_for(working, 60)
        assert (tmp_path / "cleaned").exists()


@needs_local
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGINT, id="interrupted", marks=pytest.mark.nightly),
    ],
)
def test_the_server_ends_with_the_process_that_started_it(
    tiny_model: Path, tmp_path: Path, kind: signal.Signals
) -> None:
    with starter(tiny_model, tmp_path) as (process, group, _):
        assert len(group_members(group)) == 2, "the interface and the engine"
        process.send_signal(kind)
        process.wait(20)
        wait_until_empty(group)


FORKER = """
import os, sys
from tinker_local import LocalServer
with LocalServer(sys.argv[1]) as server:
    if os.fork() == 0:
        sys.exit()
    os.wait()
    server.check()
"""


@pytest.mark.nightly
@needs_local
def test_a_forked_child_does_not_stop_the_server_which_removes_what_dead_ones_left(
    tiny_model: Path, tmp_path: Path
) -> None:
    folders = [tmp_path / f"inspect-rl-local-{name}" for name in ("left", "recent", "used")]
    for folder in folders:
        folder.mkdir()
        for name in ("lock", "server.log"):
            (folder / name).touch()
        os.utime(folder / "server.log", None if folder.name.endswith("recent") else (0, 0))
    with open(folders[2] / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, "-c", FORKER, str(tiny_model)]
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        subprocess.run(command, check=True, timeout=300, env=environment)
    assert sorted(tmp_path.glob("inspect-rl-local-*")) == folders[1:]


@pytest.mark.nightly
@needs_local
def test_a_server_keeps_its_folder_and_a_lost_engine_is_an_error_with_the_log(
    tiny_model: Path, tmp_path: Path
) -> None:
    with LocalServer(tiny_model, state_dir=tmp_path) as server:
        second = LocalServer(tiny_model, state_dir=tmp_path)
        with pytest.raises(LocalServerError, match="another local server is running"):
            second.start()
        server.check()
        assert server.pid is not None
        (engine,) = set(group_members(server.pid)) - {server.pid}
        os.kill(engine, signal.SIGKILL)
        with pytest.raises(LocalServerError, match="engine crashed") as caught:
            check_for(server, seconds=20)
        assert caught.value.log == tmp_path / "server.log"


@pytest.mark.nightly
@needs_local
def test_a_server_can_be_stopped_twice_and_started_again(tiny_model: Path) -> None:
    server = LocalServer(tiny_model)
    for _ in range(2):
        server.start()
        group, log = server.pid, server.log
        assert group is not None
        assert log is not None
        with urllib.request.urlopen(f"{server.url}/api/v1/healthz", timeout=60) as answer:
            assert json.load(answer) == {"status": "ok"}
        server.stop()
        server.stop()
        assert group_members(group) == []
        assert not log.parent.exists(), "the temporary state folder is removed"
    with pytest.raises(LocalServerError, match="not running"):
        server.check()


@needs_local
def test_a_busy_port_is_named(tiny_model: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        server = LocalServer(tiny_model, settings=LocalSettings(port=port))
        with pytest.raises(LocalServerError, match=f"port {port} .*cannot be used"):
            server.start()


@needs_local
def test_a_folder_that_cannot_be_written_is_named(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    server = LocalServer(tiny_model, state_dir=tmp_path / "file" / "run")
    with pytest.raises(LocalServerError, match=r"cannot write .* to .*file/run: Not a directory"):
        server.start()


@needs_local
def test_a_start_that_takes_too_long_is_given_up(tiny_model: Path, tmp_path: Path) -> None:
    server = LocalServer(tiny_model, state_dir=tmp_path, settings=LocalSettings(start_timeout=0.5))
    with pytest.raises(LocalServerError, match=r"not ready after 0\.5 s"):
        server.start()
    assert server.pid is None


@pytest.mark.nightly
@needs_local
def test_a_broken_model_shows_the_log(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    server = LocalServer(tmp_path)
    with pytest.raises(LocalServerError, match="engine crashed"):
        server.start()
    # A start that failed keeps its temporary folder: the log is what explains it.
    assert server.log is not None
    assert server.log.is_file()


@needs_local
def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LocalConfigError, match=r"has no config\.json"):
        LocalServer(tmp_path / "nothing")


def test_the_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *args: None if name == "skyrl" else find_spec(name, *args),
    )
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LocalConfigError, match=r"skyrl.*inspect-tinker-plugin\[local\]"):
        LocalServer(tmp_path)


@needs_local
def test_an_untested_release_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.1")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LocalConfigError, match=r"written for skyrl 0\.2\.0, and 0\.9\.1 is"):
        LocalServer(tmp_path)


@pytest.mark.parametrize("name", ["adapters", "max_lora_rank", "sample_batch", "train_batch"])
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(LocalConfigError, match=f"{name} must be at least 1"):
        dataclasses.replace(LocalSettings(), **{name: 0})  # type: ignore[arg-type]
