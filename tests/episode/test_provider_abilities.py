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
from inspect_ai.solver import Generate, Solver, TaskState, generate
from inspect_ai.util import ExecResult, sandbox, sandboxenv
from tests.episode.sandbox_folder import Counted
from tests.functions import make_solver
from tests.rl.policies import Words, renderer
from tinker_cookbook.rl.rollouts import do_group_rollout

from inspect_tinker_plugin.contracts.episodes import EpisodeResult
from inspect_tinker_plugin.contracts.errors import Cause
from inspect_tinker_plugin.rl.dataset import as_rl_dataset
from inspect_tinker_plugin.testing import play_episode

seen: list[str] = []
"""What the provider was asked, in order."""
started = threading.Event()


class BrokenRemoteError(Exception):
    """The provider's own error, which says whether commands inside the sandbox provoked it."""

    def __init__(self, *, inside_sandbox: bool) -> None:
        super().__init__("the remote machine is gone")
        self.inside_sandbox = inside_sandbox


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

    async def exec(self, cmd: list[str], *args: Any, **kwargs: Any) -> ExecResult[str]:
        if cmd[0] in ("provoked", "lost"):
            raise BrokenRemoteError(inside_sandbox=cmd[0] == "provoked")
        return await super().exec(cmd, *args, **kwargs)


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    seen.clear()
    started.clear()


@make_solver
async def runs(state: TaskState, generate: Generate, command: str) -> TaskState:
    state = await generate(state)
    await sandbox().exec([command])
    return state


async def play(*solvers: Solver, **sample: Any) -> EpisodeResult:
    row = Sample(id=1, input="?", target="!", **sample)
    task = Task(dataset=[row], solver=list(solvers), scorer=match(), sandbox="rl_remote")
    return await play_episode(task, ["!"])


async def test_a_provider_measures_episodes_and_hears_of_their_set_up() -> None:
    result = await play(generate(), files={"notes.txt": "plum"})
    assert result.error is None
    assert result.metrics["sandbox/remote_calls"] == 3.0
    assert seen == ["['notes.txt'] None", "set up"]


@pytest.mark.parametrize("measured", [{"sandbox/region": "north"}, None], ids=["text", "none"])
async def test_metrics_that_are_no_numbers_are_left_out(
    measured: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Sums, "snapshot", lambda _: measured)
    result = await play(generate())
    assert result.error is None
    assert result.scores["match"].score.value == "C"
    assert "sandbox/region" not in result.metrics
    assert "are left out" in caplog.text


@pytest.mark.parametrize(
    ("command", "cause"), [("provoked", Cause.INSIDE_SANDBOX), ("lost", Cause.SANDBOX)]
)
async def test_a_providers_error_says_itself_who_provoked_it(command: str, cause: Cause) -> None:
    result = await play(runs(command))
    assert result.error is not None
    assert result.error.cause is cause
    assert isinstance(result.error.__cause__, BrokenRemoteError)


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
