"""The relay: its committed builds, what it passes on, and that it removes itself."""

from __future__ import annotations

import platform
import shutil
import socket
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.agents.sandboxed import free_port
from tests.inspect_docker_pool.conftest import manager, open_sandbox
from tests.packages import COMPILERS, built

from inspect_tinker_plugin.agents import relay

__all__ = ["manager", "open_sandbox"]  # fixtures

SOURCES = Path(relay.__file__).parents[2]
NATIVE = Path(relay.__file__).parent / "native"
SHARED = Path("inspect_docker_pool", "native", "kernel.h")
"""What the relay's source includes."""


@pytest.mark.parametrize("architecture", COMPILERS)
def test_the_shipped_relay_is_what_its_source_builds(architecture: str, tmp_path: Path) -> None:
    native = shutil.copytree(NATIVE, tmp_path / NATIVE.relative_to(SOURCES))
    (tmp_path / SHARED).parent.mkdir(parents=True)
    shutil.copy(SOURCES / SHARED, tmp_path / SHARED)
    file = f"relay-{architecture}"
    assert built(native, file) == (NATIVE / file).read_bytes()


def test_a_machine_without_a_program_is_refused_by_name() -> None:
    with pytest.raises(relay.RelayError, match="riscv64"):
        relay.read_program("riscv64")


def test_it_ends_with_its_input_and_removes_itself(tmp_path: Path) -> None:
    if platform.system() != "Linux":
        pytest.skip("runs on Linux")
    folder = tmp_path / "own"
    folder.mkdir()
    file = folder / "relay"
    file.write_bytes(relay.read_program(platform.machine()))
    file.chmod(0o700)
    port = free_port()
    process = subprocess.Popen(
        [file, str(port), file, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    told = process.stdout

    def next_frame() -> tuple[int, int, bytes]:
        kind, id, size = struct.unpack("<III", told.read(12))
        return kind, id, told.read(size)

    assert next_frame() == (1, 0, b"")  # listens
    assert not folder.exists()
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"hello")
        assert next_frame() == (2, 1, b"")  # a connection
        assert next_frame() == (3, 1, b"hello")
        process.stdin.write(struct.pack("<III", 1, 1, 3) + b"yes" + struct.pack("<III", 2, 1, 0))
        process.stdin.flush()
        assert client.recv(10) == b"yes"
        assert client.recv(10) == b""
        assert next_frame() == (6, 1, struct.pack("<I", 3))  # was taken
        assert next_frame() == (5, 1, b"")  # is gone
    process.stdin.close()
    assert process.wait(60) == 0
    told.close()


@pytest.mark.docker
async def test_a_shell_that_the_policy_replaced_is_given_up_soon(
    open_sandbox: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "_END_SECONDS", 0.1)
    sandbox = await open_sandbox()
    replace = "printf '#!/bin/bash\\nexec cat /dev/zero\\n' > /sh; chmod 755 /sh; mv /sh /bin/sh"
    assert (await sandbox.exec(["bash", "-c", replace])).success
    with pytest.raises(relay.RelayError, match="nonsense"):
        await relay.open_relay(sandbox)
