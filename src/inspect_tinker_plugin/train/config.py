"""Builds the configuration of the cookbook's ``rl.train.main`` from a request.

Also checks that a folder is never continued with the configuration of another run.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import chz
import tinker
from chz.blueprint import (
    ConstructionException,
    ExtraneousBlueprintArg,
    InvalidBlueprintArg,
    MissingBlueprintArg,
)
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.hyperparam_utils import get_lr
from tinker_cookbook.rl import train

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.options import read_keywords
from inspect_tinker_plugin.rl.models import recommended_renderer, require_renderer
from inspect_tinker_plugin.rl.task_handle import TRAINING_ID
from inspect_tinker_plugin.train.data import TrainingDataBuilder
from inspect_tinker_plugin.train.history import (
    CHECKPOINTS,
    EVALUATION,
    EVALUATION_LOGS,
    IMITATION,
    ROLLOUT_LOGS,
    read_steps,
)
from inspect_tinker_plugin.train.request import RECIPE, TrainRequest

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
    "learning_rate": 3e-2,
    "renderer": "qwen3_instruct",
}
"""Defaults for the tiny model on the local server: a few seconds per step on two cores."""

_REFUSALS = (
    ConstructionException,
    ExtraneousBlueprintArg,
    InvalidBlueprintArg,
    MissingBlueprintArg,
)

_OWN = {"log_path": "--log-dir", "model_name": "--model", "base_url": "--base-url"}
"""Options of the cookbook that the run itself depends on."""


def build_config(request: TrainRequest, *, model: str) -> Any:
    """Make the ``tinker_cookbook.rl.train.Config`` of a run.

    Args:
        request: The training run to configure; its folder is absolute.
        model: Name of the model for the server and for the tokenizer.

    Raises:
        ConfigError: An option or an override is not usable.
    """
    for override in request.overrides:
        if (option := _OWN.get(override.partition("=")[0].lstrip("-"))) is not None:
            raise ConfigError(f"{override} is not a further argument: use {option}")
    blueprint: Any = chz.Blueprint(train.Config).apply(_fields(request, model))
    try:
        config = blueprint.apply_from_argv(list(request.overrides), allow_hyphens=True).make()
    except (*_REFUSALS, TinkerCookbookError, TypeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{first.rstrip('.')}. Further arguments are options of the cookbook's rl.train.Config "
            "as key=value, e.g. kl_penalty_coef=0.01 or dataset_builder.test_group_size=4"
        ) from error
    # Only the plain loop evaluates at every so many steps, and at no other.
    plain = config.async_config is None and config.stream_minibatch_config is None
    data = chz.replace(config.dataset_builder, eval_every=config.eval_every if plain else 0)
    config = chz.replace(config, dataset_builder=data)
    if config.kl_penalty_coef > 0 and config.kl_reference_config is None:
        # As the cookbook documents it; its loop raises an error instead.
        reference = train.KLReferenceConfig(base_model=config.model_name)
        config = chz.replace(config, kl_reference_config=reference)
    builders = [_keep_in_run(each, request.log_dir) for each in config.evaluator_builders]
    config = chz.replace(config, evaluator_builders=builders)
    _check(config)
    if request.local:
        _check_local(config)
    return config


@chz.chz
class EvaluatorBuilder:
    """A further evaluation, whose figures have names that begin with ``eval/``."""

    builder: Callable[[], SamplingClientEvaluator]

    def __call__(self) -> SamplingClientEvaluator:
        """Build the evaluator."""
        return _NamedEvaluator(self.builder())


class _NamedEvaluator(SamplingClientEvaluator):
    def __init__(self, evaluator: SamplingClientEvaluator) -> None:
        self._evaluator = evaluator

    async def __call__(self, sampling_client: tinker.SamplingClient) -> dict[str, float]:
        figures = await self._evaluator(sampling_client)
        return {EVALUATION + name.removeprefix(EVALUATION): n for name, n in figures.items()}


def _keep_in_run(builder: Any, log_dir: Path) -> EvaluatorBuilder:
    """Have an evaluator leave its logs in the run's folder, unless it names another."""
    if getattr(builder, "log_dir", "") is None:
        builder = chz.replace(builder, log_dir=str(log_dir / EVALUATION_LOGS))
    return EvaluatorBuilder(builder=builder)


_RANGES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "learning_rate": ("--learning-rate must be a number above 0", lambda n: 0 < n < math.inf),
    "temperature": ("temperature must be a number above 0", lambda n: 0 < n < math.inf),
    "kl_penalty_coef": (
        "kl_penalty_coef must be a number, at least 0",
        lambda n: 0 <= n < math.inf,
    ),
    "num_substeps": ("num_substeps must be at least 1", lambda n: n >= 1),
    "max_tokens": ("--max-tokens must be at least 1", lambda n: n >= 1),
    "lora_rank": ("--lora-rank must be at least 1", lambda n: n >= 1),
    "max_steps": ("--steps must be at least 1", lambda n: n is None or n >= 1),
    "save_every": ("--save-every must be at least 0", lambda n: n >= 0),
    "eval_every": ("--eval-every must be at least 0", lambda n: n >= 0),
    "load_checkpoint_path": (
        "load_checkpoint_path must be weights (tinker://...)",
        lambda path: path is None or path.startswith("tinker://"),
    ),
}


def _check(config: Any) -> None:
    """Refuse what the loop would refuse after its start, and what cannot teach anything."""
    for name, (rule, allowed) in _RANGES.items():
        if not allowed(getattr(config, name)):
            raise ConfigError(f"{rule}, not {getattr(config, name)!r}")
    data = config.dataset_builder.dataset_options()
    if data.group_size == 1 and config.kl_penalty_coef == 0:
        raise ConfigError(
            "--group-size 1 teaches nothing: an episode is compared with the others of its group. "
            "Take at least 2"
        )
    minibatches = config.stream_minibatch_config
    if config.async_config is not None:
        if minibatches is not None:
            raise ConfigError("async_config and stream_minibatch_config exclude each other")
        for name in ("max_steps_off_policy", "groups_per_batch"):
            least = 0 if name == "max_steps_off_policy" else 1
            if getattr(config.async_config, name) < least:
                raise ConfigError(f"async_config.{name} must be at least {least}")
    if minibatches is not None:
        if minibatches.groups_per_batch != data.batch_size:
            raise ConfigError(
                f"stream_minibatch_config.groups_per_batch must be the batch size "
                f"({data.batch_size}), not {minibatches.groups_per_batch}"
            )
        parts = minibatches.num_minibatches * config.num_substeps
        if minibatches.num_minibatches < 1 or data.batch_size % parts:
            raise ConfigError(
                f"{counted(data.batch_size, 'group')} per batch cannot be divided into {parts} "
                "equal parts (num_substeps x stream_minibatch_config.num_minibatches)"
            )
    if config.wandb_project is not None and importlib.util.find_spec("wandb") is None:
        raise ConfigError("wandb_project needs a package that is not installed: pip install wandb")


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
    learning_rate = chosen.pop("learning_rate") or _learning_rate(model)
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
    """Collect the options of the dataset that the request sets, one per field of the builder."""
    named = {"limit": request.limit, "seed": request.seed, "sandbox": request.sandbox}
    try:
        further = read_keywords(request.options, function="TrainRequest.options")
    except TypeError as error:
        raise ConfigError(str(error)) from error
    options = {"reward": request.reward, **named, **further}
    return {name: value for name, value in options.items() if value is not None}


def _renderer(name: str | None, model: str) -> str:
    if name is None:
        return recommended_renderer(model, option="--renderer")
    require_renderer(name, option="--renderer")
    return name


def _learning_rate(model: str) -> float:
    try:
        return float(get_lr(model))
    except Exception as error:
        raise ConfigError(
            f"the cookbook recommends no learning rate for the model {model!r}; give one with "
            "--learning-rate"
        ) from error


FILE = "run.json"

_OURS = (CHECKPOINTS, "config.json", "metrics.jsonl", "report.html")
"""Files that a run writes after that one."""


def check_same_run(log_dir: Path, config: Any, *, warm_start: str | None = None) -> None:
    """Record the identity of a folder's run, or compare it with the recorded one.

    Only what would change the meaning of checkpoints or held-out samples is compared;
    steps, learning rate and the like may change when a run is continued.

    Args:
        log_dir: The folder.
        config: The run's configuration.
        warm_start: Hash of the data that it imitates first.

    Raises:
        ConfigError: The folder holds another run that has begun.
    """
    path = log_dir / FILE
    text = json.dumps({**identity(config), "data to imitate": warm_start}, indent=2, default=str)
    wanted = json.loads(text)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no options")
    except FileNotFoundError:
        found = None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is damaged ({error}); choose another --log-dir") from error
    others = [name for name in _OURS if (log_dir / name).exists()]
    if found is None and others:
        raise ConfigError(
            f"{log_dir} has a {others[0]} that is of no run of `inspect rl train`, and a run would "
            "write over it; choose another --log-dir"
        )
    if found is None or not has_begun(log_dir):
        if found not in (None, wanted):
            (log_dir / TRAINING_ID).unlink(missing_ok=True)  # the logs of the other run stay
        path.write_text(text + "\n", encoding="utf-8")
        return
    for name in wanted:
        if found.get(name) != wanted[name]:
            raise ConfigError(
                f"{log_dir} holds a run with {name} {found.get(name)!r}, not {wanted[name]!r}; "
                "give the same options to continue it, or choose another --log-dir"
            )


def has_begun(log_dir: Path) -> bool:
    """Whether a run has left a step or a checkpoint; one that has not does not lock its folder."""
    if read_steps(log_dir):
        return True
    files = [folder / CHECKPOINTS for folder in (log_dir, log_dir / IMITATION)]
    return any(file.is_file() and file.stat().st_size > 0 for file in files)


def identity(config: Any) -> dict[str, Any]:
    """Return the options that a run cannot change when it is continued."""
    data = config.dataset_builder
    options = data.dataset_options()
    return {
        "model": config.model_name,
        "renderer": config.renderer_name,
        "LoRA rank": config.lora_rank,
        "task": data.task,
        "shares": data.mix,
        "task arguments": data.task_args,
        "batch size": options.batch_size,
        "seed": options.seed,
        "limit": options.limit,
        "sample ids": options.sample_id or options.sample_ids,
        "shuffled samples": options.sample_shuffle,
        "test task": data.test_task,
        "test split": data.test_split,
    }
