"""A dry run reports what a training would do and cost, and what is missing to start it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from inspect_ai import Task, eval
from inspect_ai.model import GenerateConfig, ModelOutput, ModelUsage, get_model
from inspect_ai.solver import Generate, TaskState
from tests.functions import make_solver
from tests.logs.rollouts import dataset, graded_by_word, logged, samples, two_turns
from tests.rl.tasks import sums

from inspect_tinker_plugin.cli.main import rl
from inspect_tinker_plugin.cli.train import dry_run
from inspect_tinker_plugin.testing import tokenizer_path
from inspect_tinker_plugin.train.history import RUN
from inspect_tinker_plugin.train.request import TrainRequest, cost_of

TASK = f"{Path(__file__).parents[2] / 'example_tasks' / 'word_problems.py'}"


def request(folder: Path, **changes: object) -> TrainRequest:
    given: dict[str, object] = {
        "task": TASK,
        "log_dir": folder / "run",
        "model": str(tokenizer_path()),
        "renderer": "qwen3_instruct",
        "learning_rate": 1e-4,
        "batch_size": 5,
        "group_size": 4,
        "max_tokens": 100,
    }
    return TrainRequest(**{**given, **changes})  # type: ignore[arg-type]


def tokens(kind: str, asked: TrainRequest) -> float:
    [line] = [line for line in dry_run(asked) if line.startswith(f"tokens {kind}")]
    return float(line.split()[2].replace(",", ""))


def test_a_dry_run_plans_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    text = "\n".join(dry_run(request(tmp_path), {"sample": 1_000_000.0}))
    assert "4 steps of 5 groups of 4 episodes" in text
    # 80 episodes of one reply, of 100 tokens at most, each at a price of 1
    assert "80 episodes" in text
    assert "8,000.00" in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("size", "steps"), [(8, "6 steps of 8 groups"), (50, "2 steps of 20 groups")]
)
def test_a_batch_that_a_pass_does_not_fill_is_planned_as_it_is(
    size: int, steps: str, tmp_path: Path
) -> None:
    text = "\n".join(dry_run(request(tmp_path, batch_size=size, epochs=2)))
    assert steps in text
    assert "40 samples x 4 = 160 episodes" in text


@pytest.mark.parametrize(("turns", "more"), [(1, 0), (3, 300)])
def test_the_longest_replies_are_a_part_of_later_prompts(
    turns: int, more: int, tmp_path: Path
) -> None:
    (tmp_path / "task.py").write_text(
        "from inspect_ai import Task, task\n"
        "from inspect_ai.dataset import Sample\n"
        "from inspect_ai.scorer import match\n"
        "from inspect_ai.solver import generate\n"
        "@task\n"
        "def again():\n"
        "    samples = [Sample(input='Say a.', target='a')]\n"
        f"    return Task(dataset=samples, solver=[generate()] * {turns}, scorer=match())\n"
    )

    def cached(max_tokens: int) -> float:
        changes = {"task": f"{tmp_path}/task.py", "batch_size": 1, "max_tokens": max_tokens}
        return tokens("cached", request(tmp_path, **changes))

    assert cached(200) - cached(100) == more


def test_a_dry_run_of_several_tasks_counts_the_steps_of_all(tmp_path: Path) -> None:
    toy = f"{Path(TASK).parent / 'toy.py'}@letters"
    text = "\n".join(dry_run(request(tmp_path, task=[TASK, toy], mix=[1, 3])))
    # 64 groups of the larger task are within the first 85, of which three of four are its own
    assert "17 steps of 5 groups of 4 episodes" in text


def test_a_dry_run_plays_the_samples_of_the_run(tmp_path: Path) -> None:
    """One sample is a thousand words long, and only the run of that sample is dear."""
    (tmp_path / "task.py").write_text(
        "from inspect_ai import Task, task\n"
        "from inspect_ai.dataset import Sample\n"
        "from inspect_ai.scorer import match\n"
        "@task\n"
        "def two():\n"
        "    texts = {'short': 'Say a.', 'long': 'Say a. ' * 1000}\n"
        "    samples = [Sample(id=n, input=t, target='a') for n, t in texts.items()]\n"
        "    return Task(dataset=samples, scorer=match())\n"
    )

    def prefilled(sample: str) -> float:
        changes = {"task": f"{tmp_path}/task.py@two", "batch_size": 1}
        return tokens("prefilled", request(tmp_path, **changes, options={"sample_id": sample}))

    assert prefilled("long") > 50 * prefilled("short")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--reward", "meen"], "unknown reward 'meen'"),
        (["--test-task", "nowhere.py"], "no file nowhere.py"),
        (["--workers", "2", "--ray"], "exclude each other"),
        (["learning_rat=1"], "rl.train.Config"),
        (["--allow-overlap"], "--allow-overlap needs --test-task or --test-split"),
        (["--test-arg", "a=1"], "--test-arg needs --test-task"),
        (["--warm-epochs", "3"], "--warm-epochs needs --warm-start"),
        (["--log-dir", "occupied"], "is a file, not a folder"),
        (["--log-dir", "occupied/run"], "is a file, not a folder"),
        (["--log-dir", "another"], "holds a run with"),
        (["--price", "nowhere.yaml"], "cannot be read"),
        (["--price", "occupied"], "holds no prices"),
        (["--price", "negative.yaml"], "sample = -1 is no number"),
        (["--price", "nan.yaml"], "sample = nan is no number"),
        (["--price", "typo.yaml"], "unknown price 'smaple'"),
    ],
    ids=" ".join,
)
def test_a_dry_run_says_what_cannot_work(
    options: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "occupied").write_text("a note\n")
    for name, text in (("negative", "sample: -1"), ("nan", "sample: .nan"), ("typo", "smaple: 1")):
        (tmp_path / f"{name}.yaml").write_text(text + "\n")
    (tmp_path / "another").mkdir()
    (tmp_path / "another" / RUN).write_text("{}")
    (tmp_path / "another" / "checkpoints.jsonl").write_text(
        '{"name": "000010", "batch": 10, "state_path": "tinker://a"}\n'
    )
    common = ["--model", str(tokenizer_path()), "--renderer", "qwen3_instruct"]
    common += ["--learning-rate", "1e-4", "--dry-run"]
    done = CliRunner().invoke(rl, ["train", TASK, *common, *options])
    assert done.exit_code != 0
    assert says in " ".join(done.output.split())
    assert "unexpected" not in done.output
    assert not (tmp_path / "logs").exists()


async def test_a_rollout_costs_what_it_read_sampled_and_trains_on(tmp_path: Path) -> None:
    """The task cuts its replies: what was sampled beyond is paid for, and not trained on."""
    task = Task(
        dataset=sums(1),
        solver=two_turns(),
        config=GenerateConfig(max_tokens=2),
        scorer=graded_by_word(),
    )
    data = dataset(task, tmp_path, group_size=1)
    log = await logged(data, tmp_path, ["one two three four five six seven eight nine ten " * 9])
    (record,) = samples(log)
    cost = cost_of(record, log.eval.model)
    prompts = record.model_usage["rl/policy"].input_tokens
    assert (cost.turns, cost.prefilled + cost.cached, cost.judge_tokens) == (2, prompts, 0)
    assert 0 < cost.prefilled < prompts
    assert cost.trained == cost.prefilled + 4 < cost.sampled


@make_solver
async def after_a_question(state: TaskState, generate: Generate) -> TaskState:
    state.user_prompt.text = (await get_model(role="user").generate("Ask.")).completion
    return await generate(state)


def test_an_attempt_of_an_eval_costs_what_its_own_model_used(tmp_path: Path) -> None:
    """Inspect counts the tokens that a provider read from its cache beside the others."""

    def said(**tokens: int) -> ModelOutput:
        output = ModelOutput.from_content("mockllm", "1")
        return output.model_copy(update={"usage": ModelUsage(**tokens)})

    user = get_model("mockllm/user", custom_outputs=[said(input_tokens=7, total_tokens=9)])
    own = said(
        input_tokens=3, input_tokens_cache_read=60, input_tokens_cache_write=40, output_tokens=5
    )
    (log,) = eval(
        Task(dataset=sums(1), solver=after_a_question(), scorer=graded_by_word()),
        model=get_model("mockllm/model", custom_outputs=[own]),
        model_roles={"user": user},
        log_dir=str(tmp_path),
        display="none",
    )
    cost = cost_of(samples(log)[0], log.eval.model)
    assert (cost.prefilled, cost.cached, cost.sampled, cost.trained) == (43, 60, 5, 48)
    assert cost.judge_tokens == 9
