"""A request becomes the cookbook's configuration, and every cookbook option can be set."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
from tinker_cookbook.utils.ml_log import dump_config

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.rl.task_handle import training_id
from inspect_tinker_plugin.testing import tokenizer_path
from inspect_tinker_plugin.train.config import build_config, check_request, split_phases
from inspect_tinker_plugin.train.data import Passes
from inspect_tinker_plugin.train.history import check_same_run, read_steps, record_run
from inspect_tinker_plugin.train.request import TrainRequest
from inspect_tinker_plugin.train.run import Run, _rollout_command
from tinker_local import settings as local_settings

REQUEST = TrainRequest(task="toy.py@letters", log_dir=Path("/runs/one"), local=True)
PASSES = Passes(groups=2, batch_size=2, batches=15)


def config(*overrides: str, **changes: Any) -> Any:
    request = dataclasses.replace(REQUEST, overrides=overrides, **changes)
    return build_config(request, model="/models/tiny")


def test_what_is_not_said_has_defaults_for_the_local_server() -> None:
    made = config()
    assert (made.max_steps, made.max_tokens, made.lora_rank) == (15, 16, 16)
    assert (made.dataset_builder.batch_size, made.dataset_builder.group_size) == (2, 16)
    assert made.dataset_builder.log_dir == "/runs/one/rollouts"


def test_overrides_reach_everything(caplog: pytest.LogCaptureFixture) -> None:
    made = config(
        "kl_penalty_coef=0.5",
        "async_config.max_steps_off_policy=2",
        "async_config.groups_per_batch=3",
        "dataset_builder.test_group_size=4",
        "max_tokens=99",
        "rollout_error_tolerance=True",
        "evaluator_builders.0=tinker_cookbook.eval.inspect_evaluators:InspectEvaluatorBuilder",
        "evaluator_builders.0.tasks=toy.py@letters",
        max_tokens=10,
    )
    assert made.kl_penalty_coef == 0.5
    assert made.async_config.max_steps_off_policy == 2
    assert "groups_per_batch=3, but --batch-size 2" in caplog.text
    assert made.dataset_builder.test_group_size == 4
    assert made.max_tokens == 99
    assert made.rollout_error_tolerance == RetryOnFailure(per_rollout_timeout=3600)
    (evaluator,) = made.evaluator_builders
    assert evaluator.builder.tasks == ["toy.py@letters"]
    assert evaluator.builder.log_dir == str(REQUEST.log_dir / "evaluations")


def test_tasks_to_evaluate_are_sampled_as_the_training_samples() -> None:
    file = str(Path("example_tasks/toy.py").absolute())  # Inspect takes none without @task
    made = config("temperature=0.5", eval_task=[file], eval_limit=7, max_tokens=10)
    (evaluator,) = made.evaluator_builders
    builder = evaluator.builder
    assert (builder.tasks, builder.limit, builder.max_tokens) == ([f"{file}@letters"], 7, 10)
    assert (builder.temperature, builder.renderer_name) == (0.5, "qwen3_instruct")
    assert builder.log_dir == str(REQUEST.log_dir / "evaluations")
    assert builder.model_roles is None
    with pytest.raises(ConfigError, match="other"):
        config(eval_task=["example_tasks/toy.py@other"])
    roles = {"grader": "openai/grader"}
    with pytest.raises(ConfigError, match="two tasks of --eval-task are called 'letters'"):
        config(eval_task=[file, file])
    (evaluator,) = config(eval_task=[file], options={"model_roles": roles}).evaluator_builders
    assert evaluator.builder.model_roles == roles


def test_a_teacher_is_the_reference_of_the_kl_penalty() -> None:
    made = config(teacher="tinker://other/sampler_weights/7", teacher_weight=0.5)
    assert made.kl_penalty_coef == 0.5
    assert made.kl_reference_config.load_checkpoint_path == "tinker://other/sampler_weights/7"
    assert made.dataset_builder.group_reward is None
    alone = config(teacher="tinker//models/tiny", teacher_only=True)
    assert alone.kl_reference_config.base_model == "/models/tiny"
    assert alone.dataset_builder.group_reward == "equal"


def test_a_teacher_may_leave_before_the_end() -> None:
    request = dataclasses.replace(
        REQUEST,
        options={"group_reward": "rank"},
        teacher="/models/tiny",
        teacher_only=True,
        teacher_steps=5,
    )
    taught, alone = split_phases(build_config(request, model="/models/tiny"), request)
    assert (taught.max_steps, taught.kl_penalty_coef) == (5, 1.0)
    assert taught.dataset_builder.group_reward == "equal"
    assert (alone.max_steps, alone.kl_penalty_coef, alone.kl_reference_config) == (15, 0, None)
    assert alone.dataset_builder.group_reward == "rank"
    longer = dataclasses.replace(request, teacher_steps=99)
    assert split_phases(build_config(longer, model="/models/tiny"), longer)[0].max_steps == 15


def test_a_teacher_of_this_machine_may_be_named_as_the_model_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path.parent)
    request = dataclasses.replace(REQUEST, teacher=tmp_path.name)
    made = build_config(request, model=str(tmp_path))
    assert made.kl_reference_config.base_model == str(tmp_path)


def test_a_teacher_that_cannot_teach_is_refused(tmp_path: Path) -> None:
    copy = shutil.copytree(tokenizer_path(), tmp_path / "copy")
    request = dataclasses.replace(REQUEST, teacher=str(copy))
    with pytest.raises(ConfigError, match=r"--teacher .*copy is another model .* of --local has"):
        build_config(request, model=str(tokenizer_path()))
    with pytest.raises(ConfigError, match="leave kl_penalty_coef out"):
        config("kl_penalty_coef=0.1", teacher="/models/tiny")
    with pytest.raises(ConfigError, match=r"tokenizer of .* cannot be loaded"):
        config(teacher=str(tmp_path), local=False, renderer="qwen3_instruct", learning_rate=1e-4)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("nonsense=1", "nonsense"),
        ("max_tokens=many", "max_tokens"),
        ("max_tokens", "key=value"),
        ("log_path=/elsewhere", "use --log-dir"),
        ("model_name=other", "use --model"),
    ],
)
def test_a_wrong_override_is_one_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        config(override)
    assert "\n" not in str(caught.value)


def test_a_hosted_model_that_the_cookbook_does_not_know_needs_a_renderer() -> None:
    request = dataclasses.replace(REQUEST, local=False, model="someone/unknown")
    with pytest.raises(ConfigError, match="--renderer"):
        build_config(request, model="someone/unknown")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["dataset_builder.group_size=1"], "--group-size 1 teaches nothing"),
        (["learning_rate=-1"], "--learning-rate must be a number above 0, not -1"),
        (["learning_rate=nan"], "--learning-rate must be a number above 0, not nan"),
        (["temperature=0"], "temperature must be a number above 0"),
        (["kl_penalty_coef=-1"], "kl_penalty_coef must be at least 0"),
        (["num_substeps=0"], "num_substeps must be at least 1"),
        (["max_steps=0"], "--steps must be at least 1, not 0"),
        (["max_tokens=0"], "--max-tokens must be at least 1, not 0"),
        (["lora_rank=0"], "--lora-rank must be at least 1, not 0"),
        (["save_every=-1"], "--save-every must be at least 0, not -1"),
        (["load_checkpoint_path=/runs/one"], r"must be weights \(tinker://...\), not '/runs/one'"),
        (
            ["async_config.max_steps_off_policy=-1", "async_config.groups_per_batch=1"],
            "async_config.max_steps_off_policy must be at least 0",
        ),
    ],
    ids=str,
)
def test_what_the_loop_would_stumble_over_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(*overrides)


def test_a_learning_rate_of_zero_is_not_the_recommended_one() -> None:
    with pytest.raises(ConfigError, match="--learning-rate must be a number above 0, not 0"):
        config(learning_rate=0.0)


def test_a_penalty_without_a_reference_is_measured_from_the_models_own_weights() -> None:
    made = config("kl_penalty_coef=0.5", "dataset_builder.group_size=1")
    assert made.kl_reference_config.base_model == "/models/tiny"
    with pytest.raises(ConfigError, match=r"kl_reference_config.*--local.*not other"):
        config("kl_penalty_coef=0.5", "kl_reference_config.base_model=other")


def test_a_package_that_an_option_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        config("wandb_project=x")


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_project_needs_one_of_the_packages_that_the_cookbook_knows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    known = {"wandb": None, "trackio": None, "neptune_scale": None, name: object()}
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda each: known[each] if each in known else find(each)
    )
    assert config("wandb_project=x").wandb_project == "x"


@pytest.mark.parametrize(
    ("key", "changes", "message"),
    [
        ("", {"local": False, "model": "m"}, r"TINKER_API_KEY.*--local"),
        ("tml-some", {"local": False}, "--model"),
        ("", {"workers": 2, "ray": ""}, "exclude each other"),
        ("", {"ray": "toy.py"}, r"not 'toy\.py'.*put --ray last"),
        ("", {"eval_limit": 7}, "--eval-limit needs --eval-task"),
        ("", {"teacher_only": True}, "--teacher-only needs --teacher"),
        ("", {"scan_limit": 3}, "--scan-limit needs --scan"),
        ("", {"scan_tokens": 3}, "--scan-tokens needs --scan"),
    ],
    ids=str,
)
def test_a_request_that_cannot_work_is_refused(
    key: str, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", key)
    with pytest.raises(ConfigError, match=message):
        check_request(dataclasses.replace(REQUEST, **changes))


def begin(folder: Path, **changes: Any) -> None:
    identity = Run(
        REQUEST, config(**changes), None, 15, None, tested=True, passes=PASSES
    ).identity()
    check_same_run(folder, identity)
    record_run(folder, identity)


def test_a_folder_is_not_continued_as_another_run(tmp_path: Path) -> None:
    begin(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "env/all/reward/total": 0.5}\n')
    begin(tmp_path, learning_rate=0.5, steps=99)
    with pytest.raises(ConfigError, match=r"holds a run with batch size 2, not 4.*--log-dir"):
        begin(tmp_path, batch_size=4)
    with pytest.raises(ConfigError, match="test split"):
        begin(tmp_path, test_split="0.5")


def test_a_run_that_ended_before_its_first_step_locks_no_folder(tmp_path: Path) -> None:
    begin(tmp_path)
    mine = training_id(tmp_path)
    begin(tmp_path)
    assert training_id(tmp_path) == mine
    begin(tmp_path, batch_size=4)
    assert training_id(tmp_path) != mine, "the logs in the folder are not this run's"
    (tmp_path / "checkpoints.jsonl").write_text('{"name": "000005", "batch": 5}\n')
    with pytest.raises(ConfigError, match="holds a run with batch size 4, not 2"):
        begin(tmp_path)


def test_a_line_that_was_cut_off_does_not_take_the_next_one_along(tmp_path: Path) -> None:
    begin(tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 0, "env/all/reward/total": 0.5}\n{"step": 1, "env/a')
    begin(tmp_path)
    with metrics.open("a") as file:
        file.write('{"step": 1, "env/all/reward/total": 0.75}\n')
    assert list(read_steps(tmp_path)) == [0, 1]


def test_every_option_reaches_the_builder_and_an_override_takes_none_away() -> None:
    made = config(
        "dataset_builder.options={'on_error': -1}",
        options={
            **{"max_turns": 3, "cost_limit": 0.5, "score_on_error": True, "limit": (1, 5)},
            **{"tool_executor": None, "sandbox": ("docker", "c")},
        },
    )
    assert made.dataset_builder.max_turns == 3
    assert made.dataset_builder.sandbox == ("docker", "c")
    options = made.dataset_builder.dataset_options()
    assert options.on_error == -1
    assert (options.max_turns, options.cost_limit, options.score_on_error) == (3, 0.5, True)
    assert options.limit == (1, 5)


def test_options_that_are_none_are_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="Did you mean max_turns"):
        config(options={"max_turn": 3})
    with pytest.raises(ConfigError, match=r"--renderer: there is no renderer qwen99.*qwen3"):
        config(renderer="qwen99")


@pytest.mark.parametrize("extra", [None, "packages are missing"], ids=["installed", "missing"])
def test_a_local_run_needs_a_model_folder(
    extra: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_settings, "missing", lambda: extra)
    with pytest.raises(ConfigError, match=r"Qwen/Qwen3-8B is no folder here; leave --model out"):
        check_request(dataclasses.replace(REQUEST, model="Qwen/Qwen3-8B"))


def test_the_command_that_tries_a_mixture_has_the_arguments_of_its_first_task() -> None:
    request = dataclasses.replace(
        REQUEST, task=["toy.py@letters", "b.py@sums"], task_args={"letters.samples": 3, "sums.n": 2}
    )
    made = build_config(request, model="/models/tiny")
    command = _rollout_command(request, made, "tinker://w")
    assert command.startswith("inspect rl rollout toy.py@letters -T samples=3 --model tinker://w")


def test_loggers_are_told_no_empty_mappings() -> None:
    """Weights & Biases drops them, and refuses the same configuration as a changed one."""

    def has_empty(value: Any) -> bool:
        return isinstance(value, dict) and (not value or any(map(has_empty, value.values())))

    told = dump_config(config("kl_penalty_coef=0.5"))
    assert told["dataset_builder"]["batch_size"] > 0
    assert "task_args" not in told["dataset_builder"]
    assert not has_empty(told)
