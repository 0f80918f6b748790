"""The curriculum: its weights, what it learns from logs, and its place in datasets."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import eval_async
from inspect_ai.dataset import Sample
from tests.commands import forking
from tests.logs.rollouts import by_word
from tests.logs.rollouts import roll_out as roll_out_there
from tests.rl.policies import TOKENIZER, Words, renderer
from tests.rl.tasks import arithmetic
from tinker_cookbook.rl.rollouts import do_group_rollout

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.logs import assemble_pending
from inspect_tinker_plugin.plugins import GroupOutcome, SamplePool, Sampler
from inspect_tinker_plugin.plugins.manager import default_plugins
from inspect_tinker_plugin.rl.builder import InspectRLDatasetBuilder
from inspect_tinker_plugin.rl.dataset import InspectRLDataset, Sampled, as_rl_dataset
from inspect_tinker_plugin.rl.mixture import as_rl_mixture
from inspect_tinker_plugin.samplers import Curriculum, SamplerState
from inspect_tinker_plugin.testing import scripted_model


def pool(size: int) -> SamplePool:
    samples = [Sample(id=i, input="?") for i in range(size)]
    return SamplePool(task="words", samples=samples, group_size=4, seed=1)


def taught(*outcomes: tuple[int, tuple[float, ...]], size: int = 4, **options: float) -> Curriculum:
    sampler = Curriculum(**options)
    sampler.begin(pool(size))
    for position, rewards in outcomes:
        sampler.learn(GroupOutcome(position=position, rewards=rewards, step=0))
    return sampler


def test_groups_without_a_difference_lose_weight_and_one_with_a_difference_restores_it() -> None:
    even, mixed = (0.0, 0.0), (0.0, 1.0)
    sampler = taught((0, mixed), (1, even), (2, even), (2, even))
    assert sampler.weights() == [1.0, 1 / 2 * 0.25, 1 / 2 * 0.0625, 1 / 2]
    sampler.learn(GroupOutcome(position=2, rewards=mixed, step=1))
    assert sampler.weights()[2] == 1.0
    assert taught(*[(0, even)] * 9).weights()[0] == 1 / 2 * 0.02
    assert taught((0, even), again=0.5, least=0.1).weights()[0] == 1 / 2 * 0.5


def test_a_sample_that_taught_nothing_comes_after_those_that_are_untried() -> None:
    """Where few samples are useful, an untried one is a better bet than one tried in vain."""
    weights = taught((0, (0.0, 1.0)), *[(i, (0.0, 0.0)) for i in range(1, 8)], size=9).weights()
    assert weights[0] == 1.0
    assert max(weights[1:8]) < weights[8] < 0.25
    weights = taught(*[(i, (0.0, 0.0)) for i in range(39)], size=40).weights()
    assert max(weights[:39]) <= weights[39] / 4, "however few are useful"


@pytest.mark.parametrize("tried", [40, 400])
def test_untried_samples_do_not_crowd_out_the_few_that_are_useful(tried: int) -> None:
    """In a large dataset as in a small one, most choices are samples that teach something."""
    first = [(i, (0.0, float(i % 4 == 0))) for i in range(tried)]
    again = [(i, (0.0, 1.0)) for i in range(0, tried, 4)]
    sampler = taught(*first, *again * 3, size=4000)
    drawn = [position for step in range(200) for position in sampler.choose(step, 4)]
    useful = sum(position < tried and position % 4 == 0 for position in drawn) / len(drawn)
    assert 0.6 < useful < 0.85, "three quarters, as a quarter of new samples would be useful"
    assert any(position >= tried for position in drawn)


def test_attempts_of_a_log_count_as_the_groups_that_they_make() -> None:
    sampler = taught(size=3)
    sampler.learn(GroupOutcome(position=0, rewards=(1.0,)))
    sampler.learn(GroupOutcome(position=1, rewards=(0.0,) * 8))
    share = 1 / (1 + 0.25 + 1)
    assert sampler.weights() == [share * 0.25**0.25, share * 0.0625, share]
    sampler.learn(GroupOutcome(position=0, rewards=(0.0,) * 7))  # the rest of its first group
    assert sampler.weights()[2] == 1 / 3
    sampler.learn(GroupOutcome(position=1, rewards=(0.0, 1.0), step=0))
    assert sampler.weights()[2] == 1 / 3, "not its first group"


def test_pools_are_reported() -> None:
    sampler = taught((0, (0.0, 0.0)), (1, (1.0, 1.0)), (2, (0.0, 1.0)))
    assert sampler.figures() == {"untried": 1, "useful": 1, "easy": 1, "hard": 1}


def test_samples_are_drawn_by_their_weights() -> None:
    sampler = taught(
        *[(i, (0.0, 0.0)) for i in range(10)], *[(i, (0, 1)) for i in range(10, 20)], size=20
    )
    drawn = Counter(position for step in range(400) for position in sampler.choose(step, 4))
    useful = sum(drawn[i] for i in range(10, 20)) / drawn.total()
    assert 0.75 < useful < 0.9, "ten of weight 1, ten of weight 0.25"
    assert len(set(sampler.choose(0, 20))) == 20
    assert Counter(sampler.choose(0, 40)) == dict.fromkeys(range(20), 2)


@pytest.mark.parametrize("options", [{"again": 2.0}, {"least": 0.0}])
def test_numbers_out_of_their_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="is a number"):
        Curriculum(**options)


def sampler_of(data: InspectRLDataset) -> Curriculum:
    assert isinstance(data._order, Sampled)
    assert isinstance(data._order.state.sampler, Curriculum)
    return data._order.state.sampler


def learned(folder: Path) -> int:
    """Groups that the sampler learned from."""
    (state,) = folder.glob("sampler/*/state.jsonl")
    lines = [json.loads(line) for line in state.read_text().splitlines()]
    return sum(len(line["learned"]) for line in lines[1:])


def chosen(data: InspectRLDataset, batch: int) -> list[Any]:
    return [group.sample.id for group in data.get_batch(batch)]


async def roll_out(data: InspectRLDataset, batch: int, *, useful: str = "s1") -> None:
    """Only one sample has a difference in its rewards."""
    for group in data.get_batch(batch):
        lines = ["no", group.sample.target if group.sample.id == useful else "no"]
        # as in a worker process
        sent = pickle.loads(pickle.dumps(group))
        await do_group_rollout(sent, Words([str(line) for line in lines]))


def curriculum(folder: Path | None, **options: Any) -> InspectRLDataset:
    given = {"batch_size": 2, "group_size": 2, "epochs": 9, "sampler": "curriculum", **options}
    return as_rl_dataset(arithmetic(6), renderer(), log_dir=folder, **given)


async def test_what_is_learned_decides_what_comes_next(tmp_path: Path) -> None:
    data = curriculum(tmp_path)
    seen: list[Any] = []
    for batch in range(20):
        assert chosen(data, batch) == chosen(data, batch), "the same, if it is asked again"
        seen += chosen(data, batch)
        await roll_out(data, batch)
    data.get_batch(20)
    weights = sampler_of(data).weights()
    assert weights[1] == 1.0
    assert max(weights[:1] + weights[2:]) <= 0.25
    late = Counter(seen[20:])
    assert late["s1"] >= 9, late
    assert not list((tmp_path / "sampler" / "arithmetic" / "outcomes").iterdir())


async def test_a_machine_without_the_samplers_folder_is_an_error_that_says_so(
    tmp_path: Path,
) -> None:
    data = curriculum(tmp_path / "here")
    sent = pickle.loads(pickle.dumps(data.get_batch(0)[0]))
    (tmp_path / "here").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="share the folder of the logs"):
        await sent.make_envs()


@pytest.mark.forks
def test_it_learns_from_groups_of_worker_processes(tmp_path: Path) -> None:
    data = curriculum(tmp_path)
    groups = data.get_batch(0)
    with ProcessPoolExecutor(2, mp_context=forking()) as pool:
        for future in [pool.submit(roll_out_there, group, ["no", "no"]) for group in groups]:
            assert future.result() == [0.0, 0.0]
    data.get_batch(1)
    assert learned(tmp_path) == len(groups)


async def test_another_pass_of_the_trainer_is_chosen_anew(tmp_path: Path) -> None:
    data = curriculum(tmp_path, epochs=1)
    assert len(data) == 3
    for step in range(9):
        await roll_out(data, step % 3)
    data.get_batch(0)
    assert learned(tmp_path) == 18


async def test_logs_of_an_eval_and_of_rollouts_tell_which_samples_are_useful(
    tmp_path: Path,
) -> None:
    before = as_rl_dataset(
        arithmetic(6), renderer(), group_size=2, batch_size=6, log_dir=tmp_path / "ours"
    )
    await roll_out(before, 0)
    await asyncio.to_thread(assemble_pending, tmp_path / "ours")
    (log,) = await eval_async(
        arithmetic(6),
        model=scripted_model(lambda request: "3"),
        log_dir=str(tmp_path / "evals"),
        epochs=2,
    )
    assert log.status == "success"
    data = curriculum(tmp_path / "new", sampler_logs=[str(tmp_path / "ours")])
    weights = sampler_of(data).weights()
    share = 2 / 7
    assert weights == [share * 0.25, 1.0, *[share * 0.25] * 4]
    both = [str(tmp_path / "ours"), log.location]
    weights = sampler_of(curriculum(tmp_path / "both", sampler_logs=both)).weights()
    # "3" is right for s2, which had failed before: now it has a difference
    share = 3 / 7
    assert weights == [share * 0.0625, 1.0, 1.0, *[share * 0.0625] * 3]


async def test_each_task_of_a_mixture_has_its_own(tmp_path: Path) -> None:
    data = as_rl_mixture(
        [arithmetic(4), by_word(4)],
        renderer(),
        batch_size=4,
        group_size=2,
        batches=9,
        sampler="curriculum",
        log_dir=tmp_path,
    )
    for batch in range(3):
        assert Counter(group.handle.name for group in data.get_batch(batch)) == {
            "arithmetic": 2,
            "by_word": 2,
        }
        for source in data.sources:
            await roll_out(source, batch)
    assert {path.name for path in (tmp_path / "sampler").iterdir()} == {"arithmetic", "by_word"}


async def test_the_test_set_is_not_sampled(tmp_path: Path) -> None:
    new: Any = InspectRLDatasetBuilder
    builder = new(
        task=f"{Path(__file__).parents[1] / 'rl' / 'tasks.py'}@arithmetic",
        model_name=str(TOKENIZER),
        renderer_name="qwen3_instruct",
        sampler="curriculum",
        log_dir=str(tmp_path),
        test_task=f"{Path(__file__).parents[1] / 'rl' / 'tasks.py'}@arithmetic",
    )
    train, test = await builder()
    assert isinstance(train._order, Sampled)
    assert not isinstance(test._order, Sampled)


class Twice(Sampler):
    def choose(self, step: int, count: int, /) -> list[int]:
        return [99] * count


class Forgets(Twice):
    def choose(self, step: int, count: int, /) -> list[int]:
        return [0] * count

    def learn(self, outcome: GroupOutcome, /) -> None:
        raise KeyError("seen")


class Leaves(Twice):
    def choose(self, step: int, count: int, /) -> list[int]:
        raise SystemExit(1)


def test_a_plugin_s_broken_sampler_is_named_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = default_plugins().catalogue("inspect_rl_samplers").entries["by_level"]
    monkeypatch.setattr(make, "choose", lambda self, step, count: [])
    with pytest.raises(ConfigError, match=r"plugin 'acme_tools' of acme-tools 0.2.0\): the samp"):
        curriculum(tmp_path, sampler="by_level")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: curriculum(path, sampler="curiculum"), "Did you mean curriculum"),
        (lambda path: curriculum(path, sampler="curriculum(least=0)"), "least is a number above 0"),
        (lambda path: curriculum(path, sampler=dict), "makes {}, which is not a Sampler"),
        (lambda path: curriculum(path, sampler=3), "neither an expression nor a function"),
        (lambda path: curriculum(None, sampler="curriculum"), "give log_dir"),
        (lambda path: curriculum(path, sampler=None, sampler_logs=["x"]), "needs a sampler"),
        (lambda path: curriculum(path, sampler_logs=["nowhere"]), "no log and no folder nowhere"),
        (lambda path: curriculum(path, sampler=Twice), "chose [99, 99], not 2 pos"),
        (lambda path: curriculum(path, sampler=Forgets), "failed: KeyError: 'seen'"),
        (lambda path: curriculum(path, sampler=Leaves), "failed: SystemExit: 1"),
    ],
    ids=["name", "number", "none", "digit", "log_dir", "logs", "no log", "place", "learn", "exit"],
)
def test_what_cannot_be_used_is_one_clear_line(
    tmp_path: Path, make: Callable[[Path], Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make(tmp_path)


async def test_logs_of_another_task_are_refused(tmp_path: Path) -> None:
    await eval_async(by_word(), model=scripted_model(lambda r: "3"), log_dir=str(tmp_path / "logs"))
    with pytest.raises(
        ConfigError, match=r"no log has a rewarded sample of task 'arithmetic'.*by_word"
    ):
        curriculum(tmp_path, sampler_logs=[str(tmp_path / "logs")])


def test_a_state_of_other_samples_is_refused(tmp_path: Path) -> None:
    SamplerState(tmp_path, Curriculum, pool(3)).choose(0, 1)
    with pytest.raises(ConfigError, match="is of 3 samples, and there are 4"):
        SamplerState(tmp_path, Curriculum, pool(4), first_step=1)


class Tiring(Curriculum):
    def choose(self, step: int, count: int, /) -> list[int]:
        if step == 2:
            raise RuntimeError("enough")
        return super().choose(step, count)


def test_a_sampler_that_fails_in_the_middle_of_a_run_is_named(tmp_path: Path) -> None:
    state = SamplerState(tmp_path, Tiring, pool(3))
    for step in range(2):
        state.choose(step, 1)
    with pytest.raises(ConfigError, match=r"sampler: .*Tiring.*: failed: RuntimeError: enough"):
        state.choose(2, 1)


def test_steps_after_the_checkpoint_are_forgotten_and_late_rewards_kept(tmp_path: Path) -> None:
    state = SamplerState(tmp_path, Curriculum, pool(3))
    for step in range(4):
        state.choose(step, 1)
        # the group of step 1 ends late, as in the asynchronous loop
        if step != 1:
            state.outcome_file(step, 0, 0).write([0.0, 0.0])
        if step == 2:
            state.outcome_file(1, 0, 1).write([0.0, 1.0])
    again = SamplerState(tmp_path, Curriculum, pool(3), first_step=2)
    again.choose(2, 1)
    assert isinstance(again.sampler, Curriculum)
    assert again.sampler.weights() == [2 / 3 * 0.25, 1.0, 2 / 3]
