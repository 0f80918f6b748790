"""A provider that uses no container offers what episodes can use of `contracts/sandboxes.py`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate
from inspect_ai.util import sandboxenv
from tests.episode.sandbox_folder import Counted
from tests.rl.policies import Words, renderer
from tinker_cookbook.rl.rollouts import do_group_rollout

from inspect_tinker_plugin.rl.dataset import as_rl_dataset
from inspect_tinker_plugin.testing import play_episode

seen: list[str] = []
"""What the provider was asked, in order."""
started = threading.Event()


class Sums(dict[str, float]):
    def snapshot(self) -> Mapping[str, float]:
        return dict(self)


class Announced:
    async def finish(self) -> None:
        seen.append("set up")


@dataclass(frozen=True)
class Machine:
    name: str

    def make(self) -> Future[None]:
        seen.append(f"image {self.name}")
        made: Future[None] = Future()
        made.set_result(None)
        return made

    def expect(self, count: int) -> None:
        seen.append(f"expect {count}")
        if count:  # 0 is of a dataset that goes, perhaps of an earlier test
            started.set()


@sandboxenv(name="rl_remote")
class Remote(Counted):
    @classmethod
    @contextmanager
    def record_metrics(cls) -> Iterator[Sums]:
        yield Sums({"sandbox/remote_calls": 3.0})

    @classmethod
    @contextmanager
    def share_setup(cls, files: Mapping[str, bytes], script: bytes | None) -> Iterator[Announced]:
        seen.append(f"{sorted(files)} {script!r}")
        yield Announced()

    @classmethod
    def look_ahead(
        cls, config: Any, metadata: dict[str, Any], *, files: bool, script: bool
    ) -> tuple[Machine, bool]:
        return Machine(str(metadata["machine"])), files or script


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    seen.clear()
    started.clear()


async def test_a_provider_measures_episodes_and_hears_of_their_set_up() -> None:
    row = Sample(id=1, input="?", target="!", files={"notes.txt": "plum"})
    task = Task(dataset=[row], solver=generate(), scorer=match(), sandbox="rl_remote")
    result = await play_episode(task, ["!"])
    assert result.error is None
    assert result.metrics["sandbox/remote_calls"] == 3.0
    assert seen == ["['notes.txt'] None", "set up"]


@pytest.mark.parametrize(("files", "count"), [({}, 3), ({"a": "b"}, 1)], ids=["each", "shared"])
async def test_a_dataset_has_sandboxes_made_ahead(files: dict[str, str], count: int) -> None:
    rows = [Sample(input="?", target="!", files=files, metadata={"machine": name}) for name in "ab"]
    task = Task(dataset=rows, solver=generate(), scorer=match(), sandbox="rl_remote")
    dataset = as_rl_dataset(task, renderer(), batch_size=1, group_size=3, shuffle=False)
    assert started.wait(60)
    group = await do_group_rollout(dataset.get_batch(0)[0], Words(["!"]))
    assert group.get_total_rewards() == [1.0] * 3
    assert "image a" in seen
    assert f"expect {count}" in seen
