"""Calls on a Ray cluster of two nodes: results, failures, cancelling, and the loss of a node."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import pytest
from tests.processes.test_workers import wait_until_there, work

from inspect_tinker_plugin.contracts.errors import Cause, ConfigError, EpisodeError
from inspect_tinker_plugin.processes.ray_executor import RayExecutor, missing, ray_pool

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.slow,
    pytest.mark.long,
    # Ray's own: a forked child, sockets and processes that it leaves to the garbage collector.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    two = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    yield two
    two.shutdown()


@pytest.fixture
def executor(cluster: Any) -> Iterator[RayExecutor]:
    with ray_pool(cluster.address) as pool:
        yield pool


def where(seconds: float) -> str:
    import ray

    time.sleep(seconds)
    return str(ray.get_runtime_context().get_node_id())


def fail() -> None:
    raise EpisodeError("no", cause=Cause.SANDBOX, task="t", sample_id=1)


def variable(name: str) -> str | None:
    return os.environ.get(name)


def test_results_and_errors_come_back_as_they_were(executor: RayExecutor) -> None:
    assert executor.submit(len, "four").result(60) == 4
    failed = executor.submit(fail)
    with pytest.raises(EpisodeError) as caught:
        failed.result(60)
    assert caught.value.cause is Cause.SANDBOX


def test_workers_know_the_server(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", "http://somewhere")
    with ray_pool(cluster.address) as pool:
        assert pool.submit(variable, "TINKER_BASE_URL").result(60) == "http://somewhere"


def test_cancelling_a_call_lets_it_clean_up(executor: RayExecutor, tmp_path: Path) -> None:
    started, cleaned = tmp_path / "started", tmp_path / "cleaned"
    future = executor.submit(work, started, cleaned)
    wait_until_there(started)
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result()
    wait_until_there(cleaned)


def test_leaving_the_block_interrupts_what_runs(cluster: Any, tmp_path: Path) -> None:
    started, cleaned = tmp_path / "started", tmp_path / "cleaned"
    with ray_pool(cluster.address) as pool:
        pool.submit(work, started, cleaned)
        wait_until_there(started)
    assert cleaned.exists()


def test_calls_of_a_node_that_is_killed_are_done_elsewhere(cluster: Any) -> None:
    second = cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    with ray_pool(cluster.address) as pool:
        first: list[Future[str]] = [pool.submit(where, 0.5) for _ in range(8)]
        assert len({future.result(120) for future in first}) == 2, "both nodes work"
        calls = [pool.submit(where, 2.0) for _ in range(8)]
        wait_for(calls, timeout=0.5)
        cluster.remove_node(second, allow_graceful=False)
        nodes = {future.result(120) for future in calls[4:]}
        assert all(future.result(120) for future in calls)
    assert len(nodes) == 1, "what was left ran on the node that was left"


def test_an_executor_that_was_shut_down_takes_nothing(cluster: Any) -> None:
    with ray_pool(cluster.address) as pool:
        pass
    with pytest.raises(RuntimeError, match="shut down"):
        pool.submit(len, "x")


def test_a_cluster_that_is_not_there_is_one_line() -> None:
    with pytest.raises(ConfigError, match="cannot be reached"), ray_pool("127.0.0.1:9"):
        pass
