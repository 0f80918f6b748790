"""Checks a request for a training run, and makes the cookbook's ``rl.train.Config`` of it."""

from __future__ import annotations

import importlib.util
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from logging import getLogger
from pathlib import Path
from typing import Any

import chz
from chz.blueprint import (
    ConstructionException,
    ExtraneousBlueprintArg,
    InvalidBlueprintArg,
    MissingBlueprintArg,
)
from inspect_ai import Task
from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.rl import train
from tinker_cookbook.utils.ml_log import dump_config

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.evaluate.source import find_source
from inspect_tinker_plugin.options import read_keywords
from inspect_tinker_plugin.processes import local_path
from inspect_tinker_plugin.rl.models import (
    load_tokenizer,
    no_key,
    recommended_renderer,
    require_renderer,
)
from inspect_tinker_plugin.tasks.reference import resolve_task
from inspect_tinker_plugin.tasks.samples import with_id
from inspect_tinker_plugin.train.data import EvalTasksBuilder, TrainingDataBuilder, keep_in_run
from inspect_tinker_plugin.train.history import ROLLOUT_LOGS
from inspect_tinker_plugin.train.request import TrainRequest
from inspect_tinker_plugin.train.scans import check_scanners
from inspect_tinker_plugin.train.strategies import with_deadline

logger = getLogger(__name__)

RECIPE = "inspect_rl_train"
"""How the cookbook and the service name runs of this package."""

HOSTED: dict[str, Any] = {
    "batch_size": 8,
    "group_size": 8,
    "max_tokens": 1024,
    "lora_rank": 32,
    "save_every": 10,
    "eval_every": 10,
    "steps": None,
    "learning_rate": None,
    "renderer": None,
}
"""Defaults for a model on a Tinker service; learning rate and renderer are the cookbook's."""

LOCAL: dict[str, Any] = {
    "batch_size": 2,
    "group_size": 16,
    "max_tokens": 16,
    "lora_rank": 16,
    "save_every": 5,
    "eval_every": 5,
    "steps": 15,
    "learning_rate": 2e-2,
    "renderer": "qwen3_instruct",
}
"""Defaults for the tiny model on the local server: a few seconds per step on two cores."""


def missing_key(request: TrainRequest) -> str | None:
    """Return why the Tinker service would refuse the run, ``None`` if it would not."""
    if request.local:
        return None
    return no_key("train on", "add --local to train a tiny model on this machine")


def check_request(request: TrainRequest, *, key: bool = True) -> None:
    """Refuse a request that cannot work, before tasks and models are loaded.

    Args:
        request: The request.
        key: Also refuse it if the Tinker service needs a key and there is none.
    """
    _check_folder(local_path(request.log_dir).absolute())
    has_test = request.test_task is not None or request.test_split is not None
    for option, given, needs, there in (
        (
            "--teacher-weight",
            request.teacher_weight != TrainRequest.teacher_weight,
            "--teacher",
            request.teacher is not None,
        ),
        ("--teacher-only", request.teacher_only, "--teacher", request.teacher is not None),
        ("--teacher-steps", request.teacher_steps, "--teacher", request.teacher is not None),
        ("--test-arg", request.test_task_args, "--test-task", request.test_task is not None),
        ("--test-samples", request.test_samples, "--test-task or --test-split", has_test),
        ("--allow-overlap", request.allow_overlap, "--test-task or --test-split", has_test),
        ("--eval-arg", request.eval_args, "--eval-task", bool(request.eval_task)),
        ("--eval-limit", request.eval_limit, "--eval-task", bool(request.eval_task)),
        (
            "--warm-epochs",
            request.warm_epochs != TrainRequest.warm_epochs,
            "--warm-start",
            request.warm_start is not None,
        ),
        (
            "--scan-limit",
            request.scan_limit != TrainRequest.scan_limit,
            "--scan",
            bool(request.scan),
        ),
        ("--scan-tokens", request.scan_tokens, "--scan", bool(request.scan)),
        ("--scan-model", request.scan_model, "--scan", bool(request.scan)),
    ):
        if given and not there:
            raise ConfigError(f"{option} needs {needs}")
    check_scanners(request.scan)
    if request.ray is not None:
        _check_ray(request)
    if request.local:
        _check_local_request(request)
        return
    if key and (problem := missing_key(request)):
        raise ConfigError(problem)
    if request.model is None:
        raise ConfigError("--model is missing: name the model to train, e.g. Qwen/Qwen3-8B")


def _check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be made or written."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not there.is_dir():
        raise ConfigError(f"--log-dir {folder}: {there} is a file, not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"--log-dir {folder}: {there} cannot be written")


def _check_ray(request: TrainRequest) -> None:
    from inspect_tinker_plugin.processes import ray_executor

    if request.workers is not None:
        raise ConfigError("--workers and --ray exclude each other; give one of them")
    if request.ray and ":" not in request.ray and request.ray not in ("auto", "local"):
        raise ConfigError(
            f"--ray takes the address of a cluster (HOST:PORT, ray://HOST:PORT or auto), not "
            f"{request.ray!r}; to start one here, put --ray last or before another option"
        )
    if reason := ray_executor.missing():
        raise ConfigError(reason)


def _check_local_request(request: TrainRequest) -> None:
    from tinker_local import settings as local

    if request.base_url is not None:
        raise ConfigError("--local starts its own server; leave --base-url out")
    if request.model is not None and not Path(request.model).expanduser().is_dir():
        raise ConfigError(
            f"--local trains a model of this machine, and {request.model} is no folder here; "
            "leave --model out for the tiny model, or --local to train on the Tinker service"
        )
    if reason := local.missing():  # last: what cannot work anywhere is refused first
        raise ConfigError(reason)


_REFUSALS = (
    ConstructionException,
    ExtraneousBlueprintArg,
    InvalidBlueprintArg,
    MissingBlueprintArg,
    TinkerCookbookError,
    TypeError,
    ValueError,
)
_OWN = {"log_path": "--log-dir", "model_name": "--model", "base_url": "--base-url"}
"""Options of the cookbook that the run itself depends on."""


@chz.chz
class RunConfig(train.Config):
    """The cookbook's configuration, as its loggers can keep it."""

    def to_dict(self) -> dict[str, Any]:
        """Return the values for loggers, without empty mappings.

        Weights & Biases drops those, is told the values a second time by the cookbook, and then
        refuses them as changed.
        """
        return {name: dump_config(value) for name, value in _drop_unset(chz.asdict(self)).items()}


def _drop_unset(values: Mapping[str, Any]) -> dict[str, Any]:
    kept = {
        name: _drop_unset(value) if isinstance(value, dict) else value
        for name, value in values.items()
    }
    return {name: value for name, value in kept.items() if value != {}}


def local_model(folder: str) -> str:
    """Return what the local server calls the model in a folder."""
    return str(Path(folder).expanduser().absolute())


def build_config(request: TrainRequest, *, model: str) -> Any:
    """Make the ``tinker_cookbook.rl.train.Config`` of a run.

    Args:
        request: The training run to configure; its folder is absolute.
        model: Name of the model for the server and for the tokenizer.
    """
    for override in request.overrides:
        if (option := _OWN.get(override.partition("=")[0].lstrip("-"))) is not None:
            raise ConfigError(f"{override} is not a further argument: use {option}")
    blueprint: Any = chz.Blueprint(RunConfig).apply(_fields(request, model))
    try:
        config = blueprint.apply_from_argv(list(request.overrides), allow_hyphens=True).make()
    except _REFUSALS as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{first.rstrip('.')}. Further arguments are options of the cookbook's rl.train.Config "
            "as key=value, e.g. kl_penalty_coef=0.01 or dataset_builder.test_group_size=4"
        ) from error
    # Only the plain loop evaluates at every so many steps, and at no other.
    plain = config.async_config is None and config.stream_minibatch_config is None
    data = chz.replace(
        config.dataset_builder,
        eval_every=config.eval_every if plain else 0,
        run=str(request.log_dir),
        takes_ahead=config.async_config is not None,
    )
    config = chz.replace(config, dataset_builder=data)
    if config.kl_penalty_coef > 0 and config.kl_reference_config is None:
        # As the cookbook documents it; its loop raises an error instead.
        reference = train.KLReferenceConfig(base_model=config.model_name)
        config = chz.replace(config, kl_reference_config=reference)
    builders = [*config.evaluator_builders, *_evaluations(request, config)]
    builders = [keep_in_run(each, request.log_dir) for each in builders]
    config = chz.replace(config, evaluator_builders=builders)
    if request.teacher is not None:
        config = _with_teacher(config, request)
    _check(config)
    if request.local:
        _check_local(config)
    return with_deadline(config, request.rollout_timeout)


def _evaluations(request: TrainRequest, config: Any) -> list[EvalTasksBuilder]:
    """Return what evaluates the tasks of ``--eval-task``, if there are any."""
    arguments = dict(request.eval_args)
    options = config.dataset_builder.dataset_options()
    roles = dict(options.model_roles)
    resolved = [resolve_task(task, arguments, roles=roles) for task in request.eval_task]
    if not resolved:
        return []
    names = Counter(each.task.name.rpartition("/")[2] for each in resolved)
    for each in resolved:
        _check_ids(each.task)
    if repeated := [name for name, count in names.items() if count > 1]:
        raise ConfigError(
            f"two tasks of --eval-task are called {repeated[0]!r}, so that metrics could not tell "
            "them apart; give one of them another name (@task(name=...) or Task(name=...))"
        )
    return [
        EvalTasksBuilder(
            tasks=[each.ref.spec for each in resolved if each.ref is not None],
            task_args=arguments,
            model_roles=roles or None,
            limit=request.eval_limit,
            model_name=config.model_name,
            renderer_name=config.renderer_name,
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            context_window=options.context_window,
            base_url=config.base_url,
            run=str(request.log_dir),
            eval_every=config.dataset_builder.eval_every,
        )
    ]


def _check_ids(task: Task) -> None:
    """Refuse what `inspect eval` refuses: samples with the same id."""
    counts = Counter(str(with_id(each, i).id) for i, each in enumerate(task.dataset))
    repeated = [id for id, count in counts.items() if count > 1]
    if repeated:
        raise ConfigError(
            f"--eval-task {task.name}: several samples have the id {repeated[0]!r}, which "
            "`inspect eval` refuses; give each sample its own"
        )


def _with_teacher(config: Any, request: TrainRequest) -> Any:
    """Let the loop's KL penalty draw the policy to a teacher: on-policy distillation.

    The cookbook's own distillation adds the same to the advantages, without the batch's mean.
    """
    if config.kl_penalty_coef > 0:
        raise ConfigError("--teacher is a KL penalty itself; leave kl_penalty_coef out")
    if not 0 < request.teacher_weight < math.inf:
        raise ConfigError(f"--teacher-weight must be above 0, not {request.teacher_weight!r}")
    named = str(request.teacher)
    named = named if named.startswith("tinker://") else named.removeprefix("tinker/")
    source = find_source(named, has_key=True)
    if source.local and source.run != request.log_dir:
        raise ConfigError(
            f"--teacher {request.teacher} is a run of another local server; only weights of the "
            "server that trains can teach"
        )
    teacher, student = source.base_model or config.model_name, config.model_name
    if not request.local:
        _check_teachers_tokens(teacher, student)
    elif (teacher := local_model(teacher)) != student:
        raise ConfigError(
            f"--teacher {request.teacher} is another model than the one that is trained "
            f"({student}), and the server of --local has only that one"
        )
    reference = train.KLReferenceConfig(base_model=teacher, load_checkpoint_path=source.weights)
    if request.teacher_only:
        data = chz.replace(config.dataset_builder, group_reward="equal")
        config = chz.replace(config, dataset_builder=data)
    return chz.replace(
        config, kl_penalty_coef=request.teacher_weight, kl_reference_config=reference
    )


def split_phases(config: Any, request: TrainRequest) -> list[Any]:
    """Return the configuration of each phase: one, or two where the teacher leaves in between."""
    if request.teacher_steps is None:
        return [config]
    without = replace(
        request, teacher=None, teacher_weight=1.0, teacher_only=False, teacher_steps=None
    )
    own = build_config(without, model=config.model_name).dataset_builder.group_reward
    taught = min(request.teacher_steps, config.max_steps or request.teacher_steps)
    return [
        chz.replace(config, max_steps=taught),
        chz.replace(
            config,
            kl_penalty_coef=0.0,
            kl_reference_config=None,
            dataset_builder=chz.replace(config.dataset_builder, group_reward=own),
        ),
    ]


def _check_teachers_tokens(teacher: str, student: str) -> None:
    """Refuse a base model whose tokens are not the student's; a checkpoint's server refuses it."""
    if teacher == student:
        return
    if load_tokenizer(teacher).get_vocab() != load_tokenizer(student).get_vocab():
        raise ConfigError(f"--teacher {teacher} has other tokens than {student}")


_LEAST: Mapping[str, tuple[str, float]] = {
    "kl_penalty_coef": ("kl_penalty_coef", 0),
    "num_substeps": ("num_substeps", 1),
    "max_tokens": ("--max-tokens", 1),
    "lora_rank": ("--lora-rank", 1),
    "max_steps": ("--steps", 1),
    "save_every": ("--save-every", 0),
    "eval_every": ("--eval-every", 0),
    "async_config.max_steps_off_policy": ("async_config.max_steps_off_policy", 0),
    "async_config.groups_per_batch": ("async_config.groups_per_batch", 1),
}
"""How options of the cookbook are written on the command line, and their least values."""


_TRACKERS = ("wandb", "trackio", "neptune_scale")
"""Packages that the cookbook gives ``wandb_project`` to, each that is installed."""


def _check(config: Any) -> None:
    """Refuse what the loop would refuse after its start, and what cannot teach anything."""
    for name, option in (("learning_rate", "--learning-rate"), ("temperature", "temperature")):
        if not 0 < (value := getattr(config, name)) < math.inf:
            raise ConfigError(f"{option} must be a number above 0, not {value!r}")
    for path, (option, least) in _LEAST.items():
        value = config
        for name in path.split("."):
            value = getattr(value, name, None)
        if value is not None and not least <= value < math.inf:
            raise ConfigError(f"{option} must be at least {least}, not {value!r}")
    weights = config.load_checkpoint_path
    if weights is not None and not weights.startswith("tinker://"):
        raise ConfigError(f"load_checkpoint_path must be weights (tinker://...), not {weights!r}")
    data = config.dataset_builder.dataset_options()
    if data.group_size == 1 and config.kl_penalty_coef == 0:
        raise ConfigError(
            "--group-size 1 teaches nothing: an episode is compared with the others of its group. "
            "Take at least 2"
        )
    of_loop = config.async_config and config.async_config.groups_per_batch
    if of_loop is not None and of_loop != data.batch_size:
        logger.warning(
            "async_config.groups_per_batch=%s, but --batch-size %s: steps have the one size, while "
            "logs, the plan and the samples that count as trained on go by the other",
            of_loop,
            data.batch_size,
        )
    if config.wandb_project is not None and not any(map(importlib.util.find_spec, _TRACKERS)):
        raise ConfigError(
            "wandb_project needs a package that is not installed: pip install wandb, or trackio"
        )


def _check_local(config: Any) -> None:
    """Refuse what the local server, which has one model, cannot do."""
    from tinker_local import LocalConfigError, check_reply_length

    try:
        check_reply_length(config.model_name, config.max_tokens)
    except LocalConfigError as error:
        raise ConfigError(str(error)) from error
    reference = config.kl_reference_config
    if reference is not None and reference.base_model != config.model_name:
        raise ConfigError(
            f"kl_reference_config.base_model must be the model that is trained with --local "
            f"({config.model_name}), not {reference.base_model}"
        )


def _fields(request: TrainRequest, model: str) -> dict[str, Any]:
    """Return the fields of the cookbook's configuration that the request sets, by their paths."""
    defaults = LOCAL if request.local else HOSTED
    if request.epochs != 1:
        defaults = {**defaults, "steps": None}
    chosen = {
        name: default if (value := getattr(request, name)) is None else value
        for name, default in defaults.items()
    }
    steps, renderer = chosen.pop("steps"), _renderer(chosen.pop("renderer"), model)
    if (learning_rate := chosen.pop("learning_rate")) is None:
        learning_rate = _learning_rate(model)
    of_test = ("test_task", "test_task_args", "test_split", "test_samples", "allow_overlap")
    data = {
        "task": request.task if isinstance(request.task, str) else list(request.task),
        "mix": None if request.mix is None else list(request.mix),
        "task_args": dict(request.task_args),
        "model_name": model,
        "renderer_name": renderer,
        "batch_size": chosen.pop("batch_size"),
        "group_size": chosen.pop("group_size"),
        "epochs": request.epochs,
        "min_batches": steps,
        **_options(request),
        "log_dir": str((request.log_dir / ROLLOUT_LOGS).parent),
        **{name: getattr(request, name) for name in of_test},
    }
    return {
        **chosen,
        "recipe_name": RECIPE,
        "model_name": model,
        "renderer_name": renderer,
        "log_path": str(request.log_dir),
        "base_url": request.base_url,
        "max_steps": steps,
        "learning_rate": learning_rate,
        "dataset_builder": TrainingDataBuilder,
        **{f"dataset_builder.{name}": value for name, value in data.items()},
    }


def _options(request: TrainRequest) -> dict[str, Any]:
    """Return the options of the dataset that the request sets, one per field of the builder."""
    try:
        options = read_keywords(request.options, function="TrainRequest.options")
    except TypeError as error:
        raise ConfigError(str(error)) from error
    return {name: value for name, value in options.items() if value is not None}


def _renderer(name: str | None, model: str) -> str:
    if name is None:
        return recommended_renderer(model, option="--renderer")
    require_renderer(name, option="--renderer")
    return name


def _learning_rate(model: str) -> float:
    from tinker_cookbook.hyperparam_utils import get_lr  # takes more than a second

    try:
        return float(get_lr(model))
    except Exception as error:
        raise ConfigError(
            f"the cookbook recommends no learning rate for the model {model!r}; give one with "
            "--learning-rate"
        ) from error
