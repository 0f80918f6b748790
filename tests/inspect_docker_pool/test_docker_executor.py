"""A policy's command cannot reach, stop or read the executor; every kind of break-out is tried."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from inspect_docker_pool import executor
from inspect_docker_pool.config import DockerPoolConfig
from inspect_docker_pool.environment import DockerPoolSandboxEnvironment
from inspect_docker_pool.errors import SandboxError, SandboxStartError

pytestmark = pytest.mark.docker


async def _still_fast(sandbox: DockerPoolSandboxEnvironment) -> None:
    result = await sandbox.exec(["sh", "-c", "cat /proc/$PPID/comm"])
    assert result.stdout == "executor-keeper\n"


async def test_no_signal_stops_the_executor(sandbox: DockerPoolSandboxEnvironment) -> None:
    kill = "for s in USR1 CHLD HUP INT TERM SEGV STOP KILL; do kill -$s 1; done 2>/dev/null"
    await sandbox.exec(["sh", "-c", kill])
    # Also while it waits for its next request: from a process that is left behind.
    await sandbox.exec(["sh", "-c", f"(sleep 0.3; {kill}) >/dev/null 2>&1 &"])
    await asyncio.sleep(0.8)
    await _still_fast(sandbox)


async def test_a_command_may_be_silent_for_as_long_as_it_runs(
    sandbox: DockerPoolSandboxEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a timeout: the executor answers for it."""
    monkeypatch.setattr(executor, "_SILENCE_SECONDS", 0.5)
    silent = [sandbox.exec(["sh", "-c", f"sleep {n}; echo {n}"]) for n in (4, 3)]
    assert [result.stdout for result in await asyncio.gather(*silent)] == ["4\n", "3\n"]
    assert (await sandbox.exec(["sh", "-c", "echo a; sleep 3; echo b"])).stdout == "a\nb\n"


async def test_an_executor_that_does_not_answer_is_noticed_without_a_timeout(
    sandbox: DockerPoolSandboxEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    import docker

    monkeypatch.setattr(executor, "_SILENCE_SECONDS", 0.5)
    name = (await sandbox.exec(["cat", "/etc/hostname"])).stdout.strip()
    client = docker.from_env()
    running = asyncio.ensure_future(sandbox.exec(["sleep", "100"]))
    await asyncio.sleep(0.2)
    await asyncio.to_thread(client.containers.get(name).pause)
    with pytest.raises(SandboxError):
        await asyncio.wait_for(running, 30)
    client.close()


@pytest.mark.parametrize("said", ["echo done", "yes | head -c 60000; echo done"])
async def test_a_command_does_not_pay_for_a_process_that_was_busy(
    sandbox: DockerPoolSandboxEnvironment, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    """Its end came in time, and nobody had listened."""
    monkeypatch.setattr(executor, "GRACE_SECONDS", 0.1)
    running = asyncio.ensure_future(sandbox.exec(["sh", "-c", f"sleep 1; {said}"], timeout=5))
    await asyncio.sleep(0.3)
    time.sleep(6)  # noqa: ASYNC251 - as a scorer's long computation does
    assert (await running).stdout.endswith("done\n")
    await _still_fast(sandbox)


REACH = r"""
my @found;
for my $path (glob("/proc/1/fd/*"), "/proc/1/mem", "/proc/1/environ", "/proc/1/maps") {
  for my $mode ("<", ">", "+<") { push @found, "$mode$path" if open(my $f, $mode, $path) }
}
push @found, readlink("/proc/1/fd/0") // ();
push @found, "attach" if syscall(101, 16, 1, 0, 0) == 0;
push @found, "seize" if syscall(101, 0x4206, 1, 0, 0) == 0;
my $fd = syscall(434, 1, 0);
push @found, "pidfd_getfd" if $fd >= 0 && syscall(438, $fd, 0, 0) >= 0;
print "[@found]\n";
"""


async def test_a_command_has_its_own_session_default_signals_and_nothing_of_the_executor(
    sandbox: DockerPoolSandboxEnvironment,
) -> None:
    assert (await sandbox.exec(["perl", "-e", REACH])).stdout == "[]\n"
    # The descriptors above 2 are those of the listing itself.
    listed = await sandbox.exec(["sh", "-c", "ls -l /proc/self/fd | grep -v /proc/"])
    assert "/dev/null" in listed.stdout
    assert listed.stdout.count("pipe:") == 2
    seen = await sandbox.exec(["python3", "-c", "import sys; print(sys.stdin.read())"])
    assert seen.stdout == "\n"
    ids = (await sandbox.exec(["sh", "-c", "ps -o pid=,pgid=,sid= -p $$"])).stdout.split()
    assert ids[0] == ids[1] == ids[2] != "1"
    status = ["grep", "-E", "Sig(Ign|Blk)", "/proc/self/status"]
    for user in (None, "nobody"):
        lines = (await sandbox.exec(status, user=user)).stdout.split()
        assert lines[1::2] == ["0" * 16] * 2


async def test_many_zombies_do_not_use_up_the_processes(open_sandbox: Any) -> None:
    sandbox = await open_sandbox(pids=64)
    for _ in range(10):
        await sandbox.exec(["sh", "-c", "for i in 1 2 3 4 5 6 7 8 9; do (true &) ; done"])
    await asyncio.sleep(0.3)
    await _still_fast(sandbox)


@pytest.mark.parametrize(
    "text",
    ["", "a'b\"c$d`e`\\f\n\ng\t%s%%\\n\\c", "é☽🚀", "-n", "x" * 20_000, "x" * 300_000],
    ids=["empty", "quotes", "unicode", "dash", "20k", "300k"],
)
async def test_arguments_environment_and_input_arrive_as_they_are(
    sandbox: DockerPoolSandboxEnvironment, text: str
) -> None:
    if len(text) < 100_000:  # the kernel's own limit of an argument
        result = await sandbox.exec(["printf", "%s", text], env={"V": text})
        assert result.stdout == text
        result = await sandbox.exec(["sh", "-c", 'printf %s "$V"'], env={"V": text})
        assert result.stdout == text
    assert (await sandbox.exec(["cat"], input=text)).stdout == text


async def test_another_user_and_odd_variables_arrive(sandbox: DockerPoolSandboxEnvironment) -> None:
    assert (await sandbox.exec(["id", "-un"], user="nobody")).stdout == "nobody\n"
    for env in ({"a.b": "1", "IFS": "x"}, {"_": "u", "PWD": "/x", "é": "ü", "A B": "c"}):
        listed = (await sandbox.exec(["env"], env=env)).stdout.splitlines()
        assert {f"{name}={value}" for name, value in env.items()} <= set(listed)


_KINDS: dict[str, dict[str, Any]] = {
    "own-command": {"command": ["sleep", "1000", "1"]},
    "read-only": {"read_only": True, "tmpfs": ["/tmp"]},
    "capabilities": {"cap_drop": []},
    "odd-variable": {"environment": {"a.b": "1"}},
    "ptrace": {"cap_add": ["SYS_PTRACE"]},
    "no-new-privileges-off": {"no_new_privileges": False},
    "another-user": {"user": "nobody"},
    "few-processes": {"pids": 8},
}


@pytest.mark.parametrize("kind", _KINDS)
async def test_every_kind_of_container_has_an_executor(open_sandbox: Any, kind: str) -> None:
    options = _KINDS[kind]
    sandbox = await open_sandbox(**options)
    assert (await sandbox.exec(["cat"], input="on")).stdout == "on"
    await _still_fast(sandbox)
    await sandbox.write_file("/tmp/file", "text")
    assert await sandbox.read_file("/tmp/file") == "text"
    for name, value in options.get("environment", {}).items():
        assert f"{name}={value}" in (await sandbox.exec(["env"])).stdout
    with pytest.raises(TimeoutError):
        await sandbox.exec(["sleep", "33"], timeout=1)
    assert "sleep 33" not in (await sandbox.exec(["ps", "-e", "-o", "args="])).stdout


async def test_a_command_of_its_own_runs_beside_the_executor(open_sandbox: Any) -> None:
    sandbox = await open_sandbox(command=["sh", "-c", "echo on > /tmp/up; exec sleep 1000 2"])
    assert await sandbox.read_file("/tmp/up") == "on\n"
    listed = (await sandbox.exec(["ps", "-e", "-o", "ppid=,args="])).stdout
    assert "1 sleep 1000 2" in listed
    # Its end is an ordinary event: a policy that kills it does not remove the sandbox.
    await sandbox.exec(["pkill", "sleep"])
    assert (await sandbox.exec(["echo", "on"])).stdout == "on\n"


async def test_a_command_of_its_own_that_ends_at_once_is_a_failed_start(open_sandbox: Any) -> None:
    with pytest.raises(SandboxStartError, match="ended with status 3"):
        await open_sandbox(command=["sh", "-c", "echo the reason >&2; exit 3"])
    with pytest.raises(SandboxStartError, match="nowhere"):
        await open_sandbox(command=["/nowhere"])


async def test_another_shell_and_a_user_of_the_image_serve_as_well(
    tmp_path: Path, image: str, open_sandbox: Any
) -> None:
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(
        f"FROM {image}\nRUN ln -sf bash /bin/sh && useradd -m agent\n"
        "USER agent\nWORKDIR /home/agent\n"
    )
    sandbox = await open_sandbox(DockerPoolConfig(file=str(dockerfile), warm=0))
    await _still_fast(sandbox)
    assert (await sandbox.exec(["id", "-un"])).stdout == "agent\n"
    assert (await sandbox.exec(["pwd"])).stdout == "/home/agent\n"
    assert (await sandbox.exec(["perl", "-e", REACH])).stdout == "[]\n"
    with pytest.raises(TimeoutError):
        await sandbox.exec(["sh", "-c", "trap '' TERM; sleep 30"], timeout=1)
    await sandbox.exec(["sh", "-c", "kill -9 -1; kill -TERM 1; kill -INT 1"])
    await sandbox.write_file("new/file", "text")
    assert await sandbox.read_file("new/file") == "text"
    with pytest.raises(PermissionError):
        await sandbox.write_file("/etc/file", "text")
    await _still_fast(sandbox)


async def test_an_entry_point_runs_first(tmp_path: Path, image: str, open_sandbox: Any) -> None:
    (tmp_path / "start.sh").write_text('#!/bin/sh\necho welcome; touch /tmp/ready\nexec "$@"\n')
    (tmp_path / "Dockerfile").write_text(
        f'FROM {image}\nCOPY start.sh /start.sh\nENTRYPOINT ["sh", "/start.sh"]\n'
    )
    sandbox = await open_sandbox(str(tmp_path / "Dockerfile"))
    assert await sandbox.read_file("/tmp/ready") == ""
    await _still_fast(sandbox)
