"""A group's episodes share their set-up through a snapshot, and nothing else."""

from __future__ import annotations

import asyncio
import base64
import io
import shlex
import tarfile
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.solver import Generate, TaskState
from inspect_ai.util import SandboxEnvironmentSpec, sandbox
from tests.functions import make_solver
from tests.parity.cases import ParityCase, load_corpus
from tests.parity.logged import logged
from tests.waiting import until

from inspect_docker_pool import DockerPoolConfig, process_metrics, snapshot
from inspect_docker_pool.manager import PoolManager, close_all
from inspect_tinker_plugin.contracts.episodes import EpisodeResult
from inspect_tinker_plugin.episode.runner import EpisodeRunner
from inspect_tinker_plugin.testing.sides import make_task, run_episode, run_eval
from inspect_tinker_plugin.testing.traces import compare_traces, differences

pytestmark = pytest.mark.docker

_LOOK = (
    "hostname; cat /root/made; cat /proc/sys/kernel/random/uuid; ls -A /tmp /root; "
    "stat -c '%n %a %U %Y' /root/* /tmp; env | sort | grep -v HOSTNAME"
)


@make_solver
async def looks_around(state: TaskState, generate: Generate, command: str = _LOOK) -> TaskState:
    state.store.set("seen", (await sandbox().exec(["sh", "-c", command])).stdout)
    await sandbox().exec(["sh", "-c", "echo touched >> /root/made"])
    return state


def task_of(
    setup: str | None, files: dict[str, str] | None = None, look: str = _LOOK, **options: Any
) -> Task:
    config = {"image": "inspect-rl-test/python:1", "warm": 0, "snapshot": "always", **options}
    return Task(
        dataset=[Sample(id=1, input="x", files=files, setup=setup)],
        solver=looks_around(look),
        sandbox=SandboxEnvironmentSpec("docker_pool", DockerPoolConfig(**config)),
    )


async def group_of(task: Task, size: int = 3) -> list[EpisodeResult]:
    runner = EpisodeRunner(task, keep_log=True)
    sample = task.dataset[0]
    episodes = [runner.episode(sample, epoch=number + 1) for number in range(size)]
    started = await asyncio.gather(*(episode.start() for episode in episodes))
    results = [result for result in started if isinstance(result, EpisodeResult)]
    assert len(results) == size
    return results


def forks() -> float:
    return process_metrics().get("sandbox/forks", 0)


def snapshots() -> float:
    return process_metrics().get("sandbox/snapshots", 0)


def images_of(manager: PoolManager) -> list[str]:
    listed = manager.engine.api.images(name="inspect-pool/snapshot")
    tags = [tag for image in listed for tag in image["RepoTags"] or []]
    return [tag for tag in tags if manager.owner.id in tag]


SETUP = "echo made > /root/made; mkdir -p /tmp/d; ln -s /root/made /tmp/d/link; chmod 700 /tmp/d"


async def test_a_group_sets_up_once_and_shares_nothing_else(manager: PoolManager) -> None:
    before = forks()
    results = await group_of(task_of(SETUP, {"/root/given": "given"}), 4)
    assert forks() - before == 3
    seen = [result.state.store.get("seen").splitlines() for result in results]
    assert all(result.error is None for result in results)
    # Its own host name and random number, and no trace of what another one did later.
    assert len({lines[0] for lines in seen}) == 4
    assert len({lines[2] for lines in seen}) == 4
    assert [lines[1] for lines in seen] == ["made"] * 4
    assert len({tuple(lines[3:]) for lines in seen}) == 1
    assert len(images_of(manager)) == 1
    # What the transcript shows of the set-up is the same, too.
    events = [
        [(event.action, event.file, event.input, event.result) for event in log.events
         if event.event == "sandbox"]
        for log in (result.build_log() for result in results if result.build_log)
    ]  # fmt: skip
    assert events[0]
    assert all(len(each) == len(events[0]) for each in events)
    assert [[e for e in each if "/tmp/" not in str(e)] for each in events[1:]] == [
        [e for e in events[0] if "/tmp/" not in str(e)]
    ] * 3
    close_all()
    assert images_of(manager) == []


async def test_the_next_batch_starts_from_the_same_snapshot(manager: PoolManager) -> None:
    before, taken = forks(), snapshots()
    task = task_of(SETUP)
    await group_of(task, 2)
    await group_of(task, 2)
    assert (forks() - before, snapshots() - taken) == (3, 1)
    await group_of(task_of(SETUP + "; true"), 1)
    await group_of(task_of(SETUP, {"/root/other": "x"}), 1)
    await group_of(task_of(SETUP, memory="1g"), 1)
    assert (forks() - before, snapshots() - taken) == (3, 4)


_DENY = """
import os, struct
open("/root/hidden", "w").write("x")
entries = [(1, 6, -1), (2, 0, 65534), (4, 4, -1), (16, 4, -1), (32, 4, -1)]
packed = b"".join(struct.pack("<HHi", *entry) for entry in entries)
os.setxattr("/root/hidden", "system.posix_acl_access", struct.pack("<I", 2) + packed)
"""


NOT_IN_AN_IMAGE: dict[str, tuple[str, dict[str, Any]]] = {
    "process": ("nohup sleep 600 >/dev/null 2>&1 &", {}),
    "shared-memory": ("echo x > /dev/shm/x", {}),
    "hosts": ("echo 127.0.0.1 other >> /etc/hosts", {}),
    "tmpfs": ("echo x > /scratch/x", {"tmpfs": ["/scratch:size=1m,mode=1777"]}),
    "devices": ("mkfifo /dev/pipe; echo x > /dev/file", {}),
    "mode-of-a-device": ("chmod 600 /dev/null", {}),
    "access-list": (f"python3 -c {shlex.quote(_DENY)}", {}),
    "sparse-file": ("truncate -s 9m /root/sparse", {}),
    "socket": (
        "python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('/root/door')\"",
        {},
    ),
    "name-of-layers": ("touch /root/.wh.made", {}),
    "early-time": ("touch -d 1960-01-01 /root/early", {}),
    "late-time": ("touch -d 2400-01-01 /root/late", {}),
    "flags": ("touch /root/flagged; chattr +A /root/flagged", {}),
    "network": ("ip link set lo down 2>/dev/null || true", {"cap_add": ["NET_ADMIN"]}),
    "own-command": ("true", {"command": ["sleep", "600", "600"]}),
    "opted-out": ("true", {"snapshot": False}),
}


@pytest.mark.parametrize("what", NOT_IN_AN_IMAGE)
async def test_what_an_image_cannot_hold_is_set_up_by_each(manager: PoolManager, what: str) -> None:
    setup, options = NOT_IN_AN_IMAGE[what]
    before = forks()
    look = (
        "cat /dev/shm/x /scratch/x 2>/dev/null; grep other /etc/hosts; ps -e -o args=; "
        "ls -l --time-style=+ /dev; ls -ls --time-style=+ /root | grep -v made; "
        "cat /sys/class/net/lo/flags"
    )
    task = task_of(f"#!/bin/sh\n{setup}\n", look=look, **options)
    results = [*await group_of(task, 2), *await group_of(task, 2)]
    assert [result.error for result in results] == [None] * 4
    assert len({result.state.store.get("seen") for result in results}) == 1
    assert forks() == before
    assert images_of(manager) == []


async def test_a_process_whose_first_thread_has_ended_is_state_of_the_set_up(
    manager: PoolManager, without_first_thread: bytes
) -> None:
    before = forks()
    program = base64.b64encode(without_first_thread).decode()
    task = task_of(
        "#!/bin/sh\nchmod +x /root/program; nohup /root/program >/dev/null 2>&1 &\n",
        {"/root/program": f"data:application/octet-stream;base64,{program}"},
        look="ps -e -o comm=",
    )
    results = await group_of(task, 2)
    assert ["program" in result.state.store.get("seen") for result in results] == [True, True]
    assert forks() == before


_EVERYTHING = r"""
import hashlib, os, stat
for folder, _, names in os.walk("/"):
    if folder.startswith(("/proc", "/sys", "/.inspect-pool")): continue
    for path in [folder, *(os.path.join(folder, name) for name in names)]:
        facts = os.lstat(path)
        known = [facts.st_mode, facts.st_uid, facts.st_gid, facts.st_nlink, facts.st_rdev]
        # The engine touches some at each start.
        touched = path in ("/", "/etc", "/etc/mtab", "/.dockerenv", "/.inspect-pool")
        if not touched and not path.startswith(("/dev", "/etc/h", "/etc/r")):
            known += [int(facts.st_mtime)]
        if stat.S_ISREG(facts.st_mode) and not path.startswith("/etc/host"):
            known += [facts.st_size, hashlib.sha1(open(path, "rb").read()).hexdigest()]
        if stat.S_ISLNK(facts.st_mode): known += [os.readlink(path)]
        attributes = {} if stat.S_ISLNK(facts.st_mode) else {
            name: os.getxattr(path, name) for name in os.listxattr(path)}
        print(ascii(path), known, attributes, os.listdir(folder) if path == "/srv" else "")
for path in ("/proc/self/limits", "/proc/filesystems", "/proc/sys/kernel/hostname"):
    print([line for line in open(path) if "hostname" not in path])
print([line for line in open("/proc/self/status") if line.startswith(("Uid", "Gid", "Gr", "Cap"))])
print(sorted((k, v) for k, v in os.environ.items() if k != "HOSTNAME"), os.getcwd(), os.umask(0))
"""
_RICH = """#!/bin/sh
useradd -m agent; mkdir -m 1770 /srv/d; ln /bin/true /srv/d/hard; ln -s nowhere /srv/d/soft
cp /bin/true /srv/d/suid; chmod 6755 /srv/d/suid; mkfifo /srv/d/pipe; touch -d 2001-01-01 /srv/d/old
ln -sf /usr/share/zoneinfo/Asia/Tokyo /etc/localtime; rm -rf /usr/share/doc; umask 077
echo x > /srv/x
rm -rf /usr/share/man; mkdir /usr/share/man; echo x > /usr/share/man/only
rm -rf /usr/share/info; echo a file > /usr/share/info
rm -rf /usr/share/zoneinfo/Asia; ln -s Europe /usr/share/zoneinfo/Asia
python3 -c "
import os
open(b'/srv/\\xff\\xfe', 'w').write('no text'); open('/srv/x\\ny', 'w').write('two lines')
os.makedirs('/srv/' + 'n' * 200 + '/' + 'm' * 200); os.symlink('x' * 4000, '/srv/long')"
"""


async def test_a_fork_is_equal_to_its_leader_in_all_that_a_process_sees(
    manager: PoolManager,
) -> None:
    before = forks()
    look = f"python3 -c {shlex.quote(_EVERYTHING)}"
    results = await group_of(task_of(_RICH, look=look), 2)
    assert forks() - before == 1
    leader, fork = (set(result.state.store.get("seen").splitlines()) for result in results)
    assert len(leader) > 1000
    assert leader ^ fork == set()


async def test_a_snapshot_in_use_does_not_keep_the_others(manager: PoolManager) -> None:
    await group_of(task_of(SETUP), 2)
    (used,) = images_of(manager)
    await group_of(task_of(SETUP + "; true"), 2)
    api = manager.engine.api
    labels = {"inspect-tinker-plugin.owner": "somebody else"}
    kept = api.create_container(used, ["true"], labels=labels)["Id"]
    try:
        close_all()
        assert images_of(manager) == [used]
    finally:
        manager.engine.api.remove_container(kept)
        manager.engine.api.remove_image(used)


async def test_a_set_up_that_fails_fails_each_episode_by_itself(manager: PoolManager) -> None:
    results = await group_of(task_of("#!/bin/sh\necho no wheel >&2; exit 1\n"), 3)
    assert all("no wheel" in str(result.error) for result in results)
    (pool,) = manager.pools()
    await until(lambda: pool.state.leased == pool.state.removing == 0)


async def test_a_leader_that_is_cancelled_leaves_the_others_free(manager: PoolManager) -> None:
    task = task_of("#!/bin/sh\nsleep 1; echo made > /root/made\n")
    runner = EpisodeRunner(task)
    leader, *others = [runner.episode(task.dataset[0], epoch=n) for n in (1, 2, 3)]
    first = asyncio.create_task(leader.start())
    await asyncio.sleep(0.8)
    rest = [asyncio.create_task(other.start()) for other in others]
    await asyncio.sleep(0.1)
    await leader.close()
    await asyncio.gather(first, return_exceptions=True)
    for result in await asyncio.gather(*rest):
        assert isinstance(result, EpisodeResult)
        assert result.error is None
        assert "made" in result.state.store.get("seen")


async def test_a_bound_of_one_container_is_no_deadlock(manager: PoolManager) -> None:
    results = await asyncio.wait_for(group_of(task_of(SETUP, max=1, warm=1), 3), 60)
    assert [result.error for result in results] == [None] * 3


async def test_quick_set_ups_are_repeated_and_slow_ones_shared(
    manager: PoolManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = snapshots()
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "QUICK_SECONDS", 60.0)  # quick on any machine
        await group_of(task_of(SETUP, snapshot=True), 3)
        await group_of(task_of(SETUP, snapshot=True), 3)
    assert snapshots() == taken
    await group_of(task_of("#!/bin/sh\nsleep 3\n", snapshot=True, memory="1g"), 8)
    assert snapshots() == taken + 1


async def test_a_snapshot_holds_nothing_of_the_executor_but_its_program(
    manager: PoolManager,
) -> None:
    await group_of(task_of(SETUP), 2)
    (name,) = images_of(manager)
    probe = manager.engine.api.create_container(name, ["true"])["Id"]
    try:
        archive = b"".join(manager.engine.api.get_archive(probe, "/.inspect-pool")[0])
        layers = [entry["Path"] for entry in manager.engine.api.diff(probe) or []]
    finally:
        manager.engine.api.remove_container(probe)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        names = tar.getnames()
    assert len(names) == 2, names  # the folder and the program
    assert layers == []


def _of_the_pool(case: ParityCase, folder: Path) -> Any:
    """Make the case's task with its sandboxes in the pool, forked wherever that is faithful."""

    def moved(spec: Any) -> Any:
        if spec is None or spec.type != "docker" or not isinstance(spec.config, str):
            return spec and SandboxEnvironmentSpec("docker_pool", spec.config)
        text = Path(spec.config).read_text()
        path = folder / f"{hash(text) & 0xFFFFFF}" / "compose.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\nx-docker-pool: {warm: 0, snapshot: always}\n")
        return SandboxEnvironmentSpec("docker_pool", str(path))

    def make() -> Task:
        task = make_task(case.task)
        task.sandbox = moved(task.sandbox)
        for sample in task.dataset:
            sample.sandbox = moved(sample.sandbox)
        return task

    return make


CORPUS = load_corpus(Path(__file__).parents[1] / "parity" / "corpus")
CASES = [case for case in CORPUS if case.docker and "service" not in case.id]


RARE = ("text-editor-in-docker",)
"""Cases that take long, because Inspect puts its tools into each sandbox."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(each, id=each.id, marks=[pytest.mark.nightly] if each.id in RARE else [])
        for each in CASES
    ],
)
async def test_an_episode_from_a_snapshot_is_one_that_set_itself_up(
    case: ParityCase, manager: PoolManager, tmp_path: Path
) -> None:
    task = _of_the_pool(case, tmp_path)
    expected = await run_eval(task, case.script, case.how)
    sets_up = any(sample.files or sample.setup for sample in make_task(task).dataset)
    before = forks()
    for _ in range(3):
        found = await run_episode(task, case.script, case.how)
        assert not [str(each) for each in compare_traces(expected, found)]
        assert not case.expect.faults(found)
        assert expected.log is not None
        assert found.log is not None
        logs = [logged(log, ordered=case.ordered) for log in (expected.log, found.log)]
        assert not [str(each) for each in differences(logs[0], logs[1])]
    assert forks() - before == (2 if sets_up else 0)
