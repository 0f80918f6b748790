"""Shared by all tests: an offline environment, and reasons for skipped Docker tests."""

from __future__ import annotations

import functools
import gc
import os
import signal
import subprocess
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

# No test may contact a model hub, send telemetry or draw a full-screen display.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TINKER_TELEMETRY", "0")
os.environ.setdefault("INSPECT_DISPLAY", "none")
# Example tasks run without containers, whatever images are here, unless a test asks for one.
os.environ["EXAMPLE_TASKS_IMAGE"] = "inspect-rl-test/none"
# Tables and panels are as wide as a terminal; tests have none.
os.environ.pop("COLUMNS", None)

SOURCES = str(Path(__file__).parents[1] / "src")
DOCKER_TEST_IMAGE = "inspect-rl-test/python:1"


def pytest_sessionstart() -> None:
    """Choose the display: ``eval_async`` prints plain lines where none was chosen before it."""
    from inspect_ai.util import display_type

    display_type()


@functools.cache
def missing_for_docker() -> str | None:
    """Return why Docker tests cannot run here, or None."""
    for need, command in {
        "a reachable Docker engine": ["docker", "info"],
        "the Docker compose plugin": ["docker", "compose", "version"],
        f"the image {DOCKER_TEST_IMAGE}": ["docker", "image", "inspect", DOCKER_TEST_IMAGE],
    }.items():
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError):
            return need
    return None


@functools.cache
def missing_extra(marker: str) -> str | None:
    """Return why tests with a marker cannot run here, or None."""
    if marker == "local":
        from tinker_local import missing
    else:
        from inspect_tinker_plugin.processes.ray_executor import missing
    return missing()


WORKER_OF = {
    "forks": "servers",
    "docker": "docker",
    "agents": "docker",
    "local": "servers",
    "ray": "servers",
}
"""The worker of tests with a marker, the first that is found: those that start servers or fork from
one process that has imported everything, and those that share an engine.

The tests of the pool itself have a third worker: they are half of those with an engine.
"""


SLOW_MODULES = frozenset(
    Path(__file__).parent / name
    for name in (
        "agents/test_bridges.py",
        "agents/test_host_tools.py",
        "agents/test_proxy_parity.py",
        "agents/test_side_models.py",
        "cli/test_stdout.py",
        "episode/test_state_machine.py",
        "example_tasks/test_cheats.py",
        "faults/test_hanging_parts.py",
        "faults/test_inside_sandbox.py",
        "inspect_rl_audit/test_audit.py",
        "inspect_rl_audit/test_corpus.py",
        "test_startup.py",
        "tokens/test_bridged.py",
    )
)
"""Modules that take 20 seconds and more, as measured: left to `make check`."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Keep tests of one engine in one worker when tests run in parallel; mark slow modules."""
    starts_none = "no_server" in getattr(item, "fixturenames", ())
    for name, worker in WORKER_OF.items():
        if item.get_closest_marker(name) and not starts_none:
            if "inspect_docker_pool" in item.path.parts:
                worker = "pool"
            item.add_marker(pytest.mark.xdist_group(worker))
            break
    if item.path in SLOW_MODULES:
        item.add_marker(pytest.mark.slow)


def _has(item: pytest.Item, marker: str) -> bool:
    return item.get_closest_marker(marker) is not None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the groups of pytest-xdist 3.8 take effect with pytest 9.2, which ignores ``_nodeid``.

    The worker adds the group to that name of a test, and the scheduler looks for it in its id. Slow
    tests outside of the groups begin first, so that no worker is left alone with one at the end.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: _has(item, "xdist_group") or not _has(item, "slow"))
    for item in items:
        with_group = getattr(item, "_nodeid", item.nodeid)
        if with_group != item.nodeid:
            from _pytest.nodeid import NodeId

            item._id = NodeId.parse(with_group)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude what is imported from garbage collections: each would take a second more."""
    gc.disable()
    collected = yield
    gc.enable()
    gc.freeze()
    gc.collect()  # the next full one comes when there is a quarter more than this leaves
    return collected


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("docker") and (missing := missing_for_docker()):
        # CI sets this variable once an engine is up: a skip would hide a failure there.
        if os.environ.get("INSPECT_RL_REQUIRE_DOCKER"):
            pytest.fail(f"needs {missing}, and INSPECT_RL_REQUIRE_DOCKER is set", pytrace=False)
        pytest.skip(f"needs {missing}")
    for marker in ("local", "ray"):
        if item.get_closest_marker(marker) and (missing := missing_extra(marker)):
            pytest.skip(missing)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that a local server can sample from and train."""
    from inspect_tinker_plugin.testing import tokenizer_path
    from tinker_local import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", tokenizer=tokenizer_path())


@pytest.fixture(autouse=True, scope="session")
def heeded_signals() -> None:
    """Let programs that tests start heed Ctrl-C and hang-ups, however the tests were started.

    ``nohup`` and background jobs of scripts ignore them, and whatever is started inherits that. A
    handler is not inherited.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@pytest.fixture(autouse=True, scope="session")
def unfrozen() -> Iterator[None]:
    """Let the collector work as usual: commands of this process would tune it."""
    with patch("inspect_tinker_plugin.processes.workers.freeze_memory", lambda: None):
        yield


@pytest.fixture(autouse=True)
def no_prices_are_left() -> Iterator[None]:
    """Forget the prices of models that a test has set: they hold for the whole process."""
    yield
    from inspect_ai.model import _model_info as known  # private: public is to forget all of them

    priced = [name for name, info in known._custom_models.items() if info.cost is not None]
    for name in priced:
        del known._custom_models[name]
    if priced:
        known._result_cache.clear()


@pytest.fixture(autouse=True, scope="session")
def no_nested_loops() -> Iterator[None]:
    """Fail where code of ours has Inspect run something in a loop that runs already.

    That replaces asyncio's own tasks and futures, for good, in the process of whoever trains.
    """
    from inspect_ai._util import _async  # private: no public function tells that it has done so

    nest = _async.init_nest_asyncio

    def refuse_ours() -> None:
        ours = [frame for frame in traceback.extract_stack() if frame.filename.startswith(SOURCES)]
        assert not ours, f"a loop in a running loop, from {ours[-1]}"
        nest()

    with patch.object(_async, "init_nest_asyncio", refuse_ours):
        yield


@pytest.fixture
def no_start_up_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the login shells of `bash()` find none; one may print something, and only sometimes."""
    docker = os.environ.get("DOCKER_CONFIG", str(Path.home() / ".docker"))
    monkeypatch.setenv("DOCKER_CONFIG", docker)  # contexts and plugins, such as compose
    monkeypatch.setenv("HOME", str(tmp_path))
