"""Mixtures of tasks: which groups each batch has, what their logs say, and what is refused."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from inspect_ai.log import EvalLog
from tests.commands import forking
from tests.logs.rollouts import by_word, logs_in
from tests.rl.policies import TOKENIZER, Words, renderer
from tests.rl.tasks import arithmetic
from tinker_cookbook.rl.interleaved import InterleavedRLDatasetBuilder
from tinker_cookbook.rl.metric_util import compute_trajectory_metrics
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import RLDataset

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.logs import assemble_pending
from inspect_tinker_plugin.rl.builder import InspectRLDatasetBuilder
from inspect_tinker_plugin.rl.group import InspectGroupBuilder
from inspect_tinker_plugin.rl.mixture import InspectRLMixture, Mix, MixedTask, as_rl_mixture

HERE = Path(__file__).parent
SUMS = f"{HERE / 'tasks.py'}@arithmetic"
WORDS = f"{HERE.parent / 'logs' / 'rollouts.py'}@by_word"


def named(groups: list[InspectGroupBuilder]) -> list[tuple[str, Any]]:
    return [(group.handle.name, group.sample.id) for group in groups]


def mixture(tmp_path: Path | None = None, **options: Any) -> InspectRLMixture:
    tasks = [MixedTask(arithmetic(7), 2), MixedTask(by_word(3), 1)]
    return as_rl_mixture(tasks, renderer(), log_dir=tmp_path, **{"batch_size": 3, **options})


def builder_of(**options: Any) -> Any:
    new: Any = InspectRLDatasetBuilder
    return new(model_name=str(TOKENIZER), renderer_name="qwen3_instruct", **options)


@pytest.mark.parametrize("size", [1, 3, 8, 10])
@pytest.mark.parametrize("shares", [(5, 3, 2), (0.55, 0.3, 0.15), (1,), (1, 1000), (3, 3)], ids=str)
def test_shares_hold_in_every_batch_and_exactly_over_many(
    shares: tuple[float, ...], size: int
) -> None:
    mix = Mix(tuple(map(float, shares)), size)
    seen = [0] * len(shares)
    for batch in range(200):
        dealt = Counter(mix.deal(batch))
        for source, share in enumerate(shares):
            places = mix.places(source, batch)
            assert list(places) == list(range(seen[source], seen[source] + dealt[source]))
            seen[source] += dealt[source]
            fair = share / sum(shares) * size
            assert abs(dealt[source] - fair) < 2
            assert abs(seen[source] - fair * (batch + 1)) < 1 + 1e-3 * fair * (batch + 1)


_FILE = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate
from inspect_sentinel import AfterGenerate, Context, Monitor, Observation, monitor

@monitor
def monitor_of_{name}() -> Monitor:
    async def observe(context: Context, step: AfterGenerate) -> Observation:
        return Observation(suspicion=0)

    return observe

@task
def {name}():
    return Task([Sample("a", target="b")], solver=generate(), scorer=match())
"""


@pytest.mark.forks
def test_another_process_knows_the_names_of_all_tasks_files(tmp_path: Path) -> None:
    pytest.importorskip("inspect_sentinel")
    tasks = []
    for name in ("first", "second"):
        file = tmp_path / f"{name}.py"
        file.write_text(_FILE.format(name=name))
        tasks.append(MixedTask(str(file)))
    mixed = as_rl_mixture(tasks, renderer(), batch_size=2, sentinel="monitor_of_first")
    with ProcessPoolExecutor(1, mp_context=forking()) as pool:
        [_, second] = mixed.get_batch(0)
        assert pool.submit(_name_of, second).result() == "second"


def _name_of(builder: InspectGroupBuilder) -> str:
    return builder.handle.parts().runner.name


def test_a_mixture_lasts_until_every_task_was_gone_through() -> None:
    data = mixture(epochs=2)
    groups = [group for batch in range(len(data)) for group in named(data.get_batch(batch))]
    counts = Counter(groups)
    assert all(counts["arithmetic", f"s{i}"] >= 2 for i in range(7))
    assert all(counts["by_word", f"s{i}"] >= 2 for i in range(3))
    assert len(data) == 7, "one batch less would leave a sample of the larger task out"
    assert len(mixture(batches=40)) == 40


def test_a_batch_is_the_same_whenever_it_is_asked_for() -> None:
    data = mixture(shuffle=True, seed=3, batches=20)
    forwards = [named(data.get_batch(batch)) for batch in range(20)]
    again = mixture(shuffle=True, seed=3, batches=20)
    assert [named(again.get_batch(batch)) for batch in reversed(range(20))] == forwards[::-1]
    other = mixture(shuffle=True, seed=4, batches=20)
    assert [named(other.get_batch(batch)) for batch in range(20)] != forwards


async def roll_out(data: RLDataset, batch: int) -> dict[str, float]:
    builders = data.get_batch(batch)
    groups = await asyncio.gather(*[do_group_rollout(b, Words(["1"])) for b in builders])
    return compute_trajectory_metrics(list(groups), [b.logging_tags() for b in builders])


def summarize(log: EvalLog) -> tuple[Any, ...]:
    known = log.eval.metadata or {}
    samples = {sample.metadata["inspect_rl"]["policy_step"] for sample in log.samples or []}
    assert samples == {known["policy_step"]} == {log.eval.model_args["policy_step"]}
    return log.eval.task, known["policy_step"], known["groups"], known["groups_logged"], log.status


async def test_every_task_has_a_true_log_of_each_batch(tmp_path: Path) -> None:
    data = mixture(tmp_path, group_size=2)
    steps = [await roll_out(data, batch) for batch in range(3)]
    assemble_pending(tmp_path)
    assert sorted(summarize(log) for log in logs_in(tmp_path)) == [
        *[("arithmetic", step, 2, 2, "success") for step in range(3)],
        *[("by_word", step, 1, 1, "success") for step in range(3)],
    ]
    # arithmetic s0 is "1"; the cookbook reports each task apart
    assert steps[0]["env/arithmetic/reward/total"] == 0.5
    assert steps[0]["env/arithmetic/total_episodes"] == 4
    assert steps[0]["env/by_word/total_episodes"] == 2


async def test_a_resumed_mixture_continues_with_its_groups_and_steps(tmp_path: Path) -> None:
    (tmp_path / "checkpoints.jsonl").write_text('{"name": "2", "batch": 2, "state_path": "x"}\n')
    builder = builder_of(
        task=[SUMS, WORDS],
        mix=[2, 1],
        batch_size=3,
        task_args={"arithmetic.count": 7, "count": 3},
        log_dir=str(tmp_path / "rollouts"),
        shuffle=False,
    )
    data, test = await builder()
    assert test is None
    assert named(data.get_batch(2)) == named(mixture().get_batch(2))
    await roll_out(data, 2)
    assemble_pending(tmp_path / "rollouts" / "train")
    assert sorted(summarize(log) for log in logs_in(tmp_path)) == [
        ("arithmetic", 2, 2, 2, "success"),
        ("by_word", 2, 1, 1, "success"),
    ]


async def test_over_a_second_pass_of_the_trainer_steps_go_on(tmp_path: Path) -> None:
    data = mixture(tmp_path)
    for step in range(len(data) + 2):
        await roll_out(data, step % len(data))
    assemble_pending(tmp_path)
    steps = sorted(
        step for task, step, *_ in map(summarize, logs_in(tmp_path)) if task == "by_word"
    )
    assert steps == list(range(len(data) + 2))


@pytest.mark.parametrize(("batch_size", "limit"), [(1, 2), (4, 4), (3, 7)])
async def test_the_cookbooks_interleaving_is_logged_without_a_step(
    tmp_path: Path, batch_size: int, limit: int
) -> None:
    sources = [
        builder_of(
            task=task,
            batch_size=batch_size,
            limit=limit,
            task_args={"count": 7},
            log_dir=str(tmp_path),
            interleaved=True,
        )
        for task in (SUMS, WORDS)
    ]
    new: Any = InterleavedRLDatasetBuilder
    builder = new(sources=sources, weights=[1, 1], groups_per_batch=3, total_batches=4)
    data, _ = await builder()
    for batch in range(4):
        await roll_out(data, batch)
    assemble_pending(tmp_path / "train")
    logs = logs_in(tmp_path)
    assert len(logs) == 12
    assert {summarize(log)[1:] for log in logs} == {(None, 1, 1, "success")}
    known = [log.eval.metadata or {} for log in logs]
    assert {(each["batch"], each["visit"]) for each in known} == {(None, None)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: as_rl_mixture([], renderer()), "at least one task"),
        (lambda: as_rl_mixture([arithmetic(2), arithmetic(3)], renderer()), "'arithmetic'"),
        (
            lambda: as_rl_mixture([MixedTask(arithmetic(), -1), by_word()], renderer()),
            "a number above 0, not -1",
        ),
        (
            lambda: as_rl_mixture([MixedTask(arithmetic(), options={"seed": 1})], renderer()),
            "seed cannot be options of one task",
        ),
    ],
    ids=["none", "names", "share", "option"],
)
def test_what_cannot_be_mixed_is_one_clear_line(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        make()
    assert "\n" not in str(raised.value)
