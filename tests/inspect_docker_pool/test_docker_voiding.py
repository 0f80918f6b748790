"""A policy tries to have its bad episodes run again, and a busy harness loses nothing.

What commands bring about in their container is never the engine's failure, which would be retried.
"""

from __future__ import annotations

import asyncio
import errno
import time
from typing import Any

import pytest
from tests.waiting import until

from inspect_docker_pool.manager import PoolManager

pytestmark = pytest.mark.docker

_AT_ONCE = 60
"""Commands that together write more than the buffers between executor and harness hold."""
_PIECE = 60_000
"""Bytes that fit into a pipe, so that a command ends although nobody reads its output."""


async def _while_nobody_listens(calls: list[Any]) -> list[Any]:
    tasks = [asyncio.ensure_future(call) for call in calls]
    await asyncio.sleep(0)
    time.sleep(5)  # noqa: ASYNC251 - a harness that is busy elsewhere
    return await asyncio.gather(*tasks)


async def test_output_and_files_wait_for_a_harness_that_does_not_listen(open_sandbox: Any) -> None:
    sandbox = await open_sandbox()
    results = await _while_nobody_listens(
        [sandbox.exec(["head", "-c", str(_PIECE), "/dev/zero"]) for _ in range(_AT_ONCE)]
    )
    assert {(result.returncode, len(result.stdout)) for result in results} == {(0, _PIECE)}
    await sandbox.write_file("/tmp/file", "x" * _PIECE)
    results = await _while_nobody_listens([sandbox.read_file("/tmp/file") for _ in range(_AT_ONCE)])
    assert {len(result) for result in results} == {_PIECE}


@pytest.mark.parametrize(
    ("name", "target", "number"),
    [
        ("long", "a" * 300, errno.ENAMETOOLONG),
        ("past-a-file", "/etc/passwd/x", errno.ENOTDIR),
        ("b" * 300, "", errno.ENAMETOOLONG),
        ("\udcff", "", errno.ENOENT),
        ("nothing", "", errno.ENOENT),
        ("fd", "/proc/self/fd/0", errno.EINVAL),
    ],
    ids=["long-link", "past-a-file", "long-name", "no-text", "nothing", "descriptor"],
)
async def test_a_path_that_only_the_engine_may_read_is_never_the_engines_failure(
    open_sandbox: Any, name: str, target: str, number: int
) -> None:
    sandbox = await open_sandbox(user="nobody")
    link = f"ln -s '{target}' '/tmp/own/{name}';" if target else ""
    await sandbox.exec(["sh", "-c", f"mkdir /tmp/own; {link} chmod 700 /tmp/own"])
    with pytest.raises(OSError) as raised:
        await sandbox.read_file(f"/tmp/own/{name}")
    assert raised.value.errno == number


_LEASE = """
import fcntl, os, signal, time
def release(*_):
    time.sleep(0.5)
    open('/tmp/released', 'w').close()
    fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    raise SystemExit
signal.signal(signal.SIGIO, release)
file = os.open('/tmp/file', os.O_WRONLY | os.O_CREAT, 0o666)
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
"""
_HELD = "open('/tmp/held', 'w').close()\n"


async def test_a_lease_on_a_file_is_waited_for(open_sandbox: Any) -> None:
    sandbox = await open_sandbox()
    for use in (sandbox.write_file, sandbox.read_file):
        words = ("whole",) if use == sandbox.write_file else ()
        holder = asyncio.ensure_future(
            sandbox.exec(["python3", "-c", _LEASE + _HELD + "time.sleep(60)"], timeout=60)
        )
        await sandbox.exec(["sh", "-c", "until rm /tmp/held; do sleep 0.1; done"], timeout=60)
        assert await use("/tmp/file", *words) in (None, "whole")
        assert (await sandbox.exec(["rm", "/tmp/released"])).success, "it did not wait"
        await holder


async def test_a_command_as_large_as_the_kernel_takes_and_any_timeout_are_taken(
    open_sandbox: Any,
) -> None:
    sandbox = await open_sandbox()
    words = ["x"] * 150_000
    result = await sandbox.exec(["python3", "-c", "import sys; print(len(sys.argv))", *words])
    assert result.stdout == "150001\n"
    assert (await sandbox.exec(["echo", "fine"], timeout=10**10)).stdout == "fine\n"


async def test_a_timeout_holds_while_all_slots_are_taken(
    manager: PoolManager, open_sandbox: Any
) -> None:
    sandbox = await open_sandbox(pids=1000)
    others = [asyncio.ensure_future(sandbox.exec(["sleep", "600"])) for _ in range(128)]
    top = manager.engine.api.top
    await until(lambda: str(top(sandbox.container.id)["Processes"]).count("sleep 600") == 128)
    with pytest.raises(TimeoutError):
        await sandbox.exec(["true"], timeout=1)
    assert not any(other.done() for other in others)
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    assert (await sandbox.exec(["true"], timeout=60)).success
