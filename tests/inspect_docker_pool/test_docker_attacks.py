"""A policy attacks its sandbox: no result is forged, stolen, bent or carried over.

Each attack was seen to work on an executor that shared its pipes and its user with commands.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from pathlib import Path
from typing import Any

import pytest
from inspect_ai.util import OutputLimitExceededError, SandboxUnavailableError
from tests.inspect_docker_pool.test_docker_executor import REACH
from tests.waiting import until

from inspect_docker_pool.environment import DockerPoolSandboxEnvironment
from inspect_docker_pool.errors import SandboxMisusedError
from inspect_docker_pool.manager import PoolManager

pytestmark = pytest.mark.docker

REPEATS = 50
"""Of attacks that race with the executor."""


USERS = ["root", pytest.param("nobody", marks=pytest.mark.nightly)]
"""Who runs the commands; the executor has its own user either way."""


@pytest.fixture(params=USERS)
async def policy(request: pytest.FixtureRequest, open_sandbox: Any) -> DockerPoolSandboxEnvironment:
    """A sandbox whose commands run as root, and one whose commands run as another user."""
    sandbox: DockerPoolSandboxEnvironment = await open_sandbox(user=request.param, pids=128)
    await sandbox.exec(["mkdir", "-p", "/tmp/work"])
    return sandbox


async def _attack(sandbox: DockerPoolSandboxEnvironment, program: str) -> None:
    """Leave a Python program behind that has the command's own pipes."""
    daemon = f"import os, sys, time\nif os.fork(): os._exit(0)\nos.setsid()\n{program}"
    with contextlib.suppress(TimeoutError):
        await sandbox.exec(["python3", "-c", daemon], timeout=10)


_THIEF = """
import glob, threading
def steal(path, forged):
    try: pipe = os.open(path, os.O_RDONLY)
    except OSError: return
    while True:
        try: taken = os.read(pipe, 65536)
        except OSError: return
        if not taken: return
        open('/tmp/work/stolen', 'ab').write(taken)
        try: os.write(1, forged(taken))
        except OSError: pass
def forged(taken):
    nonce = taken[2:34]
    return b'\\x1eb' + nonce + b'\\nforged\\n\\x1ee' + nonce + b' 0\\n'
for path in ('/proc/self/fd/0', '/proc/self/fd/1', '/proc/self/fd/2', '/proc/1/fd/0',
             '/proc/1/fd/1'):
    threading.Thread(target=steal, args=(path, forged), daemon=True).start()
for target in (1, 2):
    os.set_blocking(target, False)
end = time.monotonic() + 20
while time.monotonic() < end: time.sleep(0.1)
"""


async def test_a_daemon_on_an_earlier_commands_pipes_forges_no_status_and_no_write(
    policy: DockerPoolSandboxEnvironment,
) -> None:
    for _ in range(4):
        await _attack(policy, _THIEF)
    for attempt in range(REPEATS):
        failed = await policy.exec(["sh", "-c", "echo real; exit 1"], timeout=60)
        assert (failed.returncode, failed.stdout) == (1, "real\n"), attempt
        await policy.write_file("/tmp/work/hidden_test", f"assert {attempt}")
        assert await policy.read_file("/tmp/work/hidden_test") == f"assert {attempt}"
    with contextlib.suppress(FileNotFoundError):
        stolen = await policy.read_file("/tmp/work/stolen")
        assert "assert" not in stolen


_BEND = {
    "not-blocking": "for fd in (0, 1, 2): os.set_blocking(fd, False)",
    "append": "import fcntl\nfcntl.fcntl(1, fcntl.F_SETFL, os.O_APPEND | os.O_NONBLOCK)",
    "signals": (
        "import fcntl, signal\n"
        "for fd in (1, 2):\n"
        "  fcntl.fcntl(fd, fcntl.F_SETOWN, 1)\n"
        "  fcntl.fcntl(fd, 10, signal.SIGKILL)\n"
        "  fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)"
    ),
    "small-pipe": "import fcntl\nfor fd in (1, 2): fcntl.fcntl(fd, 1031, 4096)",
    "closed": "os.close(0); os.close(1); os.close(2)",
    "shut-input": "os.close(0)",
}


@pytest.mark.parametrize("way", _BEND)
async def test_what_a_command_does_to_its_pipes_ends_with_it(
    policy: DockerPoolSandboxEnvironment, way: str
) -> None:
    await policy.exec(["python3", "-c", f"import os\n{_BEND[way]}"], timeout=60)
    for _ in range(8):
        large = await policy.exec(["seq", "1", "400000"], timeout=30)
        assert large.returncode == 0
        assert large.stdout.endswith("\n400000\n")
        assert len(large.stdout) == 2688895
    assert (await policy.exec(["cat"], input="x" * 300_000, timeout=30)).stdout == "x" * 300_000


_LIMITS = """
for target in 1 $PPID; do
  for limit in as core cpu data fsize locks memlock msgqueue nice nofile nproc rss sigpending stack
  do prlimit --pid $target --$limit=0:0; done
  renice -n 19 -p $target
  chrt --idle -p 0 $target
  ionice -c 3 -p $target
  taskset -p 1 $target
  for file in oom_score_adj oom_adj comm autogroup timerslack_ns clear_refs coredump_filter
  do echo 19 > /proc/$target/$file; done
done 2>/dev/null
ulimit -f 0 -n 3
renice -n 19 -p $$
umask 777
"""

_STATE = """
grep -v '^Max pending' /proc/self/limits
nice; umask; taskset -p $$ | sed 's/.*mask//'; chrt -p $$ | sed 's/.*current//'; ionice -p $$
cat /proc/self/oom_score_adj /proc/self/coredump_filter /proc/self/timerslack_ns
grep -E '^(Sig|Cap|Uid|Gid|Groups|NoNew|Seccomp)' /proc/self/status | grep -v SigQ
env | sort
pwd
"""


async def test_limits_and_priorities_do_not_pass_to_later_commands(
    policy: DockerPoolSandboxEnvironment,
) -> None:
    before = await policy.exec(["sh", "-c", _STATE])
    assert "Max open files" in before.stdout
    await policy.exec(["sh", "-c", _LIMITS], timeout=60)
    after = await policy.exec(["sh", "-c", _STATE])
    assert after.stdout == before.stdout
    await policy.write_file("/tmp/work/file", "x" * 100_000)


_BECOME = r"""
my ($uid) = `cat /proc/1/status` =~ /Uid:\s+(\d+)/;
$uid += 0;  # syscall would pass the address of a text
syscall(157, 8, 1, 0, 0, 0);  # keep the capabilities
syscall(119, $uid, $uid, $uid) == 0 or die "it could not change its group";
syscall(117, $uid, $uid, $uid) == 0 or die "it could not change its user";
"""

_LOWER = r"""
my $limit = pack("QQ", 5, 5);
syscall(302, 1, 1, $limit, 0) == 0 or die "it could not lower a limit";
"""

_PIN = r"""
my $mask = pack("Q", 1);
syscall(203, 1, 8, $mask) == 0 or die "it could not choose a processor";
"""


async def test_where_a_policy_may_change_users_it_still_reaches_nothing_of_the_executor(
    open_sandbox: Any,
) -> None:
    sandbox = await open_sandbox(cap_drop=[])
    before = await sandbox.exec(["sh", "-c", _STATE])
    reached = await sandbox.exec(["perl", "-e", _BECOME + REACH])
    assert (reached.returncode, reached.stdout, reached.stderr) == (0, "[]\n", "")
    assert "could not choose" in (await sandbox.exec(["perl", "-e", _BECOME + _PIN])).stderr
    assert (await sandbox.exec(["sh", "-c", _STATE])).stdout == before.stdout
    lowered = await sandbox.exec(["perl", "-e", _BECOME + _LOWER])
    assert "could not lower" in lowered.stderr
    assert (await sandbox.exec(["sh", "-c", _STATE])).stdout == before.stdout
    await sandbox.write_file("/tmp/file", "text")


_ESCAPES = {
    "session": "setsid sleep 71 & sleep 30",
    "double-fork": "(setsid sh -c 'sleep 71 & exit' &) ; sleep 30",
    "no-environment": "env -i setsid sh -c 'sleep 71 & sleep 71' & sleep 30",
    "ignores-signals": "trap '' TERM HUP INT; setsid sleep 71 & sleep 30",
    "stopped": "setsid sh -c 'kill -STOP $$; sleep 71' & setsid sleep 71 & sleep 30",
    "renamed": "setsid python3 -c \"open('/proc/self/comm','w').write('a) S 1 1');"
    "import os; os.execvp('sleep', ['sleep', '71'])\" & sleep 30",
    "subreaper": "perl -e 'syscall(157, 36, 1, 0, 0, 0); if (!fork) { setpgrp; exec qw(sleep 71) }"
    " sleep 30'",
    "closes-all": "setsid sh -c 'exec sleep 71 <&- >&- 2>&-' & sleep 30",
    "ends-itself": "setsid sleep 71 & trap 'exit 0' TERM; sleep 30 & wait",
}


@pytest.mark.parametrize("way", _ESCAPES)
async def test_nothing_outlives_a_timeout(policy: DockerPoolSandboxEnvironment, way: str) -> None:
    with pytest.raises(TimeoutError):
        await policy.exec(["sh", "-c", _ESCAPES[way]], timeout=1)
    left = await policy.exec(["ps", "-e", "-o", "args="])
    assert "71" not in left.stdout


async def test_what_a_finished_command_left_in_the_background_lives_on(
    policy: DockerPoolSandboxEnvironment,
) -> None:
    await policy.exec(["sh", "-c", "setsid sleep 72 >/dev/null 2>&1 &"])
    await policy.exec(["sh", "-c", "sleep 73 >/dev/null 2>&1 & sleep 0.1"])
    with pytest.raises(TimeoutError):
        await policy.exec(["sleep", "30"], timeout=1)
    left = (await policy.exec(["ps", "-e", "-o", "args="])).stdout
    assert "sleep 72" in left
    assert "sleep 73" in left


async def test_output_that_a_child_still_holds_is_waited_for_as_the_engine_does(
    policy: DockerPoolSandboxEnvironment,
) -> None:
    late = await policy.exec(["sh", "-c", "(sleep 1; echo late) & echo now"])
    assert late.stdout == "now\nlate\n"
    held = await policy.exec(["sh", "-c", "sleep 600 & echo now"])
    assert held.stdout == "now\n"
    assert "sleep 600" in (await policy.exec(["ps", "-e", "-o", "args="])).stdout


async def test_a_background_process_and_parallel_commands_change_nothing(
    policy: DockerPoolSandboxEnvironment,
) -> None:
    await policy.exec(["sh", "-c", "while :; do echo noise; sleep 0.01; done >/dev/null 2>&1 &"])

    async def one(n: int) -> None:
        await policy.write_file(f"/tmp/work/{n}", str(n) * 1000)
        result = await policy.exec(["sh", "-c", f"cat; cat /tmp/work/{n}; exit {n}"], input="in ")
        assert (result.returncode, result.stdout) == (n, "in " + str(n) * 1000)
        assert await policy.read_file(f"/tmp/work/{n}") == str(n) * 1000

    for _ in range(3):
        await asyncio.gather(*(one(n) for n in range(20)))


@pytest.mark.parametrize(
    "limits",
    ["pids_limit: 1000", "ulimits: {nofile: 100}", "ulimits: {nofile: {soft: 64, hard: 1000}}"],
)
async def test_more_commands_at_once_than_it_can_run_wait_their_turn(
    open_sandbox: Any, image: str, tmp_path: Path, limits: str, compose_plugin: None
) -> None:
    service = f"{{image: '{image}', network_mode: none, command: sleep infinity, {limits}}}"
    (tmp_path / "compose.yaml").write_text(
        f"services: {{default: {service}}}\nx-docker-pool: {{warm: 0}}\n"
    )
    sandbox = await open_sandbox(str(tmp_path / "compose.yaml"))

    async def one(n: int) -> str:
        return str((await sandbox.exec(["sh", "-c", f"sleep 0.2; echo {n}"])).stdout)

    assert await asyncio.gather(*map(one, range(150))) == [f"{n}\n" for n in range(150)]


async def test_killing_everything_ends_no_result(policy: DockerPoolSandboxEnvironment) -> None:
    killed = (
        "import os, signal\nwhile True:\n try: os.kill(-1, signal.SIGKILL)\n except OSError: pass"
    )
    await policy.exec(["sh", "-c", 'python3 -c "$0" >/dev/null 2>&1 & sleep 0.2', killed])
    for _ in range(10):  # its own commands die, which is told as it is; files do not
        result = await policy.exec(["sleep", "30"], timeout=60)
        assert result.returncode == 137
        await policy.write_file("/tmp/work/file", "text")
        assert await policy.read_file("/tmp/work/file") == "text"


_TRAPS = {
    "loop": ("ln -s b /tmp/work/a; ln -s a /tmp/work/b", "/tmp/work/a", errno.ELOOP),
    "long": (":", "/tmp/work/" + "n" * 300, errno.ENAMETOOLONG),
    "deep": (":", "/tmp/work" + "/d" * 3000, errno.ENAMETOOLONG),
    "folder": ("mkdir /tmp/work/d", "/tmp/work/d", errno.EISDIR),
    "under-a-file": ("touch /tmp/work/f", "/tmp/work/f/x", errno.ENOTDIR),
    "pipe": ("mkfifo /tmp/work/p", "/tmp/work/p", errno.EINVAL),
    "link-to-a-pipe": ("mkfifo /tmp/work/p; ln -s p /tmp/work/l", "/tmp/work/l", errno.EINVAL),
    "pipe-with-a-reader": (
        "mkfifo /tmp/work/p; sleep 60 <>/tmp/work/p >/dev/null 2>&1 &",
        "/tmp/work/p",
        errno.EINVAL,
    ),
    "nowhere": ("ln -s /nowhere/x /tmp/work/l", "/tmp/work/l", errno.ENOENT),
    "null": ("ln -s /dev/null /tmp/work/l", "/tmp/work/l", errno.EINVAL),
    "own-pipe": ("ln -s /proc/self/fd/0 /tmp/work/l", "/tmp/work/l", None),
    "process-1": ("ln -s /proc/1/fd/1 /tmp/work/l", "/tmp/work/l", None),
    "full": (":", "/small/file", errno.ENOSPC),
}


@pytest.mark.parametrize("trap", _TRAPS)
@pytest.mark.parametrize("user", USERS)
async def test_a_write_succeeds_only_if_it_was_done(
    open_sandbox: Any, trap: str, user: str
) -> None:
    setting, path, number = _TRAPS[trap]
    sandbox = await open_sandbox(user=user, tmpfs=["/small:size=64k,mode=1777"])
    await sandbox.exec(["sh", "-c", f"mkdir -p /tmp/work; {setting}"])
    with pytest.raises(OSError) as caught:
        await asyncio.wait_for(sandbox.write_file(path, "x" * 100_000), 60)
    if number is not None:
        assert caught.value.errno == number
    assert (await sandbox.exec(["echo", "on"])).stdout == "on\n"


_TYPED: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "null-in-a-word": ({"cmd": ["echo", "a\0b"]}, ValueError),
    "null-in-the-environment": ({"cmd": ["env"], "env": {"A": "a\0b"}}, ValueError),
    "null-in-the-folder": ({"cmd": ["pwd"], "cwd": "/a\0b"}, ValueError),
    "half-a-character": ({"cmd": ["echo", "\ud800"]}, UnicodeEncodeError),
    "half-a-character-of-input": ({"cmd": ["cat"], "input": "\ud800"}, UnicodeEncodeError),
    "too-long": ({"cmd": ["echo", "x" * 5_000_000]}, OSError),
    "not-executable": ({"cmd": ["/etc/passwd"]}, PermissionError),
}


@pytest.mark.parametrize("case", _TYPED)
async def test_requests_that_cannot_be_made_fail_as_with_the_stock_provider(
    sandbox: DockerPoolSandboxEnvironment, case: str
) -> None:
    arguments, expected = _TYPED[case]
    with pytest.raises(expected):
        await sandbox.exec(**arguments)
    assert (await sandbox.exec(["echo", "on"])).stdout == "on\n"


async def test_a_command_that_is_not_there_has_the_stock_providers_status(
    sandbox: DockerPoolSandboxEnvironment, manager: PoolManager
) -> None:
    plain = await sandbox.exec(["no-such-program"])
    assert plain.returncode == manager.engine.not_found_status
    assert 'exec: "no-such-program": executable file not found in $PATH' in plain.stdout
    timed = await sandbox.exec(["no-such-program"], timeout=60)
    assert timed.returncode == 127
    assert "failed to run command 'no-such-program'" in timed.stderr
    assert (await sandbox.exec(["true"], cwd="/nowhere")).returncode == 126


async def test_text_that_is_none_is_the_readers_error(
    sandbox: DockerPoolSandboxEnvironment,
) -> None:
    await sandbox.exec(["sh", "-c", r"printf '\377' > /tmp/file"])
    with pytest.raises(UnicodeDecodeError):
        await sandbox.read_file("/tmp/file")
    assert await sandbox.read_file("/tmp/file", text=False) == b"\xff"


async def test_a_file_that_grows_while_it_is_read_is_bounded(
    sandbox: DockerPoolSandboxEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inspect_ai.util import SandboxEnvironmentLimits

    with monkeypatch.context() as patch:
        patch.setattr(SandboxEnvironmentLimits, "MAX_READ_FILE_SIZE", 1024**2)
        for path in ("/proc/self/pagemap", "/dev/shm/large"):
            await sandbox.exec(["sh", "-c", "head -c 2000000 /dev/zero > /dev/shm/large"])
            with pytest.raises((OutputLimitExceededError, OSError)):
                await asyncio.wait_for(sandbox.read_file(path), 30)


_HOGS = {
    "processes": "import os, time\nwhile True:\n try:\n  if os.fork() == 0: time.sleep(60)\n"
    " except OSError: time.sleep(1)",
    "bomb": "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
    "memory": "f = open('/dev/shm/x', 'wb', buffering=0)\nwhile True: f.write(b'x' * 1000000)",
}


@pytest.mark.parametrize("hog", _HOGS)
async def test_a_policy_that_uses_everything_up_is_to_blame_for_what_fails(
    open_sandbox: Any, hog: str
) -> None:
    sandbox = await open_sandbox(pids=64, memory="64m")
    leave = ["sh", "-c", 'python3 -c "$0" >/dev/null 2>&1 & sleep 2', _HOGS[hog]]
    with contextlib.suppress(SandboxMisusedError, SandboxUnavailableError, TimeoutError):
        await sandbox.exec(leave, timeout=30)
    for _ in range(5):
        with contextlib.suppress(SandboxMisusedError, OSError):
            result = await asyncio.wait_for(sandbox.exec(["sh", "-c", "echo real; exit 1"]), 60)
            if result.stdout == "real\n":
                assert result.returncode in (1, 137)
            assert not result.success
        with contextlib.suppress(SandboxMisusedError, OSError):
            await asyncio.wait_for(sandbox.write_file("/tmp/file", "x" * 5000), 60)
            assert await sandbox.read_file("/tmp/file") == "x" * 5000


async def test_a_command_whose_keeper_is_killed_or_stopped_is_waited_for_all_the_same(
    open_sandbox: Any,
) -> None:
    sandbox = await open_sandbox(cap_drop=[])  # root may then end any process but process 1
    for _ in range(10):
        result = await sandbox.exec(["sh", "-c", "kill -9 -1; echo survived; exit 4"], timeout=60)
        assert (result.returncode, result.stdout) == (4, "survived\n")
        assert (await sandbox.exec(["echo", "on"])).stdout == "on\n"
    stop = ["sh", "-c", "for n in 1 2 3; do kill -STOP $PPID; sleep 0.1; done; exit 4"]
    assert (await asyncio.wait_for(sandbox.exec(stop), 30)).returncode == 4


_LOCK = """
import fcntl, os, signal, time
signal.signal(signal.SIGIO, lambda *_: None)
users = os.open("/etc/passwd", os.O_WRONLY)
fcntl.fcntl(users, fcntl.F_SETLEASE, fcntl.F_WRLCK)
open("/tmp/held", "w").close()
while True: time.sleep(60)
"""


async def test_a_lease_on_the_list_of_users_holds_up_no_request(open_sandbox: Any) -> None:
    sandbox = await open_sandbox()
    lock = 'setsid python3 -c "$0" >/dev/null 2>&1 & until rm /tmp/held; do sleep 0.1; done'
    await sandbox.exec(["sh", "-c", lock, _LOCK])
    for request in (sandbox.exec(["true"]), sandbox.read_file("/etc/hosts")):
        with pytest.raises(SandboxMisusedError, match="lists of users"):
            await asyncio.wait_for(request, 30)


async def test_a_file_that_is_held_up_for_too_long_is_the_policys_fault(
    open_sandbox: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inspect_docker_pool.container._FILE_SECONDS", 1.0)
    sandbox = await open_sandbox()
    lock = 'setsid python3 -c "$0" >/dev/null 2>&1 & until rm /tmp/held; do sleep 0.1; done'
    await sandbox.write_file("/tmp/file", "")
    await sandbox.exec(["sh", "-c", lock, _LOCK.replace("/etc/passwd", "/tmp/file")])
    for request in (sandbox.read_file("/tmp/file"), sandbox.write_file("/tmp/file", "")):
        with pytest.raises(TimeoutError) as failed:
            await asyncio.wait_for(request, 30)
        assert isinstance(failed.value, SandboxMisusedError)


async def test_output_that_a_solver_does_not_read_takes_bounded_memory(
    sandbox: DockerPoolSandboxEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inspect_docker_pool.executor._MOST_UNREAD", 1000)
    command = await sandbox.open_command(["sh", "-c", "seq 100000"])
    assert command is not None
    await sandbox.exec(["sleep", "1"])  # which reads for both
    out, _ = await command.receive()
    assert len(out) == 1000
    assert out.endswith(b"\n100000\n")
    await command.close()


async def test_an_image_without_any_program_has_files_and_an_honest_status(
    tmp_path: Any, open_sandbox: Any
) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /empty\n")
    sandbox = await open_sandbox(str(tmp_path / "Dockerfile"))
    await sandbox.write_file("/a/b/file", "text")
    assert await sandbox.read_file("/a/b/file") == "text"
    assert not (await sandbox.exec(["sh", "-c", "echo on"])).success


async def test_a_replaced_shell_decides_nothing_but_its_own_status(open_sandbox: Any) -> None:
    sandbox = await open_sandbox()
    replace = "cp /bin/true /tmp/sh; mv /tmp/sh /bin/sh; rm -f /dev/null; echo forged > /dev/null"
    await sandbox.exec(["bash", "-c", replace])
    await sandbox.write_file("/tmp/file", "text")
    assert await sandbox.read_file("/tmp/file") == "text"
    assert (await sandbox.exec(["cat"])).stdout == ""
    assert not (await sandbox.exec(["false"])).success


async def test_a_cancelled_command_ends_though_nobody_takes_its_output(
    sandbox: DockerPoolSandboxEnvironment, manager: PoolManager
) -> None:
    loud = asyncio.create_task(sandbox.exec(["sh", "-c", "setsid yes | head -c 9000000; sleep 60"]))
    await asyncio.sleep(0.01)
    loud.cancel()
    await asyncio.gather(loud, return_exceptions=True)

    def has_ended() -> bool:  # seen from outside, so that nothing is read from the executor
        listed = str(manager.engine.api.top(sandbox.container.id)["Processes"])
        return "yes" not in listed and "sleep 60" not in listed

    await until(has_ended)
    assert (await sandbox.exec(["echo", "on"])).stdout == "on\n"


_FLIPS = """
import os, sys
os.makedirs("/root/closed/inner")
os.chdir("/root/closed/inner")
open("regular", "w").write("answer")
os.mkfifo("pipe")
os.link("regular", "file")
os.symlink("/root/closed/inner/file", "/root/answer.txt")
os.chmod("/root/closed", 0)
os.close(1)
os.close(2)
while True:
    for kind in ("pipe", "regular"):
        os.link(kind, "other")
        os.rename("other", "file")
"""


async def test_a_pipe_in_place_of_a_file_does_not_stop_a_reader(
    open_sandbox: Any, manager: PoolManager
) -> None:
    sandbox = await open_sandbox()
    await sandbox.write_file("/tmp/flips.py", _FLIPS)
    await sandbox.exec(["sh", "-c", "python3 /tmp/flips.py & sleep 1"])
    found: set[str] = set()
    async with asyncio.timeout(60):
        for _ in range(60):
            try:
                found.add(await sandbox.read_file("/root/answer.txt"))
            except OSError as error:
                found.add(str(error.strerror))
    assert found == {"answer", "Not a regular file."}
    state = manager.engine.api.inspect_container(sandbox.container.id)["State"]
    assert (state["Running"], state["Paused"]) == (True, False)
    assert (await sandbox.exec(["echo", "on"])).stdout == "on\n"
