"""The executor's program, on both architectures: built from its source, and at work."""

from __future__ import annotations

import os
import platform
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.packages import COMPILERS, built

from inspect_docker_pool import container
from inspect_docker_pool.errors import SandboxConfigError

NATIVE = Path(container.__file__).parent / "native"


class Talk:
    """The executor as process 1 of a namespace, without an engine."""

    def __init__(self, command: list[str]) -> None:
        self.emulated = command[0].startswith("qemu")
        self._process = subprocess.Popen(
            ["unshare", "--pid", "--fork", "--mount-proc", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def send(self, kind: int, id: int, body: bytes = b"") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(struct.pack("<III", len(body), kind, id) + body)
        self._process.stdin.flush()

    def run(self, kind: int, *words: str, input: bytes | None = None) -> tuple[bytes, list[int]]:
        head = (kind, (input is not None) | 2, len(words) - 2, 0, 2000, 0, 1 << 20)
        self.send(2, 7, struct.pack("<IIIIIIQ", *head) + _strings(*words))
        if input is not None:
            self.send(3, 7, input)
            self.send(4, 7)
        output = b""
        while True:
            answer, body = self.answer()
            if answer == 2:
                output += body
            if answer == 5:
                return output, list(struct.unpack("<IIIII", body))

    def answer(self) -> tuple[int, bytes]:
        assert self._process.stdout is not None
        size, kind, _ = struct.unpack("<III", self._process.stdout.read(12))
        return kind, self._process.stdout.read(size)

    def end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        assert self._process.wait(20) == 0
        self._process.stdout.close()


def _strings(*words: str) -> bytes:
    return b"".join(word.encode() + b"\0" for word in words)


@pytest.fixture(params=COMPILERS)
def talk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Talk]:
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a process namespace needs root and unshare")
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine())
    emulator = {"amd64": "qemu-x86_64-static", "arm64": "qemu-aarch64-static"}[request.param]
    if request.param != machine and shutil.which(emulator) is None:
        pytest.skip(f"needs {emulator}")
    path = tmp_path / "executor"
    shutil.copy(NATIVE / f"executor-{request.param}", path)
    path.chmod(0o755)
    for folder in (tmp_path, *list(tmp_path.parents)[:-1]):
        if folder.owner() == "root" and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o011)
    command = [str(path)] if request.param == machine else [emulator, str(path)]
    one = Talk(command)
    one.send(1, 0, struct.pack("<QII", 0, 0, 1) + _strings("root", "/"))
    assert one.answer() == (1, struct.pack("<II", 1, 0))
    kind, _ = one.answer()
    assert kind == 8
    yield one
    one.end()


def test_it_runs_commands_and_ends_them_with_all_their_descendants(talk: Talk) -> None:
    assert talk.run(0, "root", "/", "sh", "-c", "echo $PWD; exit 3") == (
        b"/\n",
        [0, 0, 3 << 8, 0, 0],
    )
    assert talk.run(0, "root", "/", "cat", input=b"x" * 20000)[0] == b"x" * 20000
    output, end = talk.run(0, "nobody", "/", "id", "-un")
    assert (output, end[0]) == (b"nobody\n", 0)
    assert talk.run(0, "root", "/", "no-such-program")[1][0] == 1
    escape = "setsid sh -c 'setsid sleep 71 & sleep 71' & sleep 30"
    assert talk.run(0, "root", "/", "sh", "-c", escape)[1][1] == 1
    if talk.emulated:
        return  # QEMU's user mode does not know "subreapers" (its release 7.2)
    left = talk.run(0, "root", "/", "ps", "-e", "-o", "args=")[0]
    assert b"sleep 71" not in left


def test_it_writes_and_reads_files(talk: Talk, tmp_path: Path) -> None:
    path = str(tmp_path / "new" / "file")
    tmp_path.chmod(0o777)
    assert talk.run(1, "root", path, "5", input=b"hello")[1][0] == 3
    assert talk.run(2, "0", path)[0] == b"hello"
    assert talk.run(1, "root", path, "6", input=b"short")[1][0] == 1
    os.mkfifo(tmp_path / "pipe")
    assert talk.run(2, "0", str(tmp_path / "pipe"))[1][0] == 1


@pytest.mark.parametrize("architecture", COMPILERS)
def test_a_shipped_program_is_what_its_source_builds(architecture: str, tmp_path: Path) -> None:
    file = f"executor-{architecture}"
    native = shutil.copytree(NATIVE, tmp_path / "native")
    assert built(native, file) == (NATIVE / file).read_bytes()


def test_an_image_without_a_program_for_it_is_refused() -> None:
    for architecture in COMPILERS:
        assert container.pack_program(architecture, "/")
    with pytest.raises(SandboxConfigError, match="not riscv64"):
        container.pack_program("riscv64", "/")
