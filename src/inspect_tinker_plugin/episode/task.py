"""A task made ready to run episodes: its plan, scorers, sandbox and limits, resolved once."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from logging import getLogger
from typing import Any, Literal, cast

from inspect_ai import Task
from inspect_ai.agent import as_solver, is_agent
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, Model, get_model_info
from inspect_ai.scorer import Score, Scorer, Target
from inspect_ai.solver import Generate, Solver, TaskState, chain
from inspect_ai.util import SandboxEnvironmentSpec, SandboxEnvironmentType, registry_info

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.episodes import SolverLike
from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.policy import POLICY_MODEL, check_side_roles, read_side_models
from inspect_tinker_plugin.episode.model import MergedConfigs, PolicyModel, RoleBook, scoring
from inspect_tinker_plugin.episode.monitors import resolve_monitors
from inspect_tinker_plugin.inspect_internals.releases import require_tried
from inspect_tinker_plugin.options import EpisodeOptions, read_token_limit
from inspect_tinker_plugin.tasks.loading import find_providers, model_of_role

logger = getLogger(__name__)


@dataclass(frozen=True)
class NamedScorer:
    """A scorer with the name that an eval log would give it."""

    name: str
    scorer: Scorer
    keys: tuple[str, ...] = ()
    """Keys that its dict score must have; as in an eval, a missing key is an error."""


@dataclass(frozen=True)
class SampleLimits:
    """The limits of a sample: the caller's where given, else the task's, as ``eval()`` does."""

    message: int | None
    token: int | None
    token_type: Any
    turn: int | None
    time: int | None
    working: int | None
    cost: float | None

    @classmethod
    def of(cls, task: Task, options: EpisodeOptions) -> SampleLimits:
        """Merge them; a token limit keeps its own way of counting."""

        def first(mine: Any, theirs: Any) -> Any:
            return theirs if mine is None else mine

        token, token_type = task.token_limit, task.token_limit_type
        if options.token_limit is not None:
            token, token_type = read_token_limit(options.token_limit)
        return cls(
            message=first(options.message_limit, task.message_limit),
            token=token,
            token_type=token_type or "all",
            turn=task.turn_limit,
            time=first(options.time_limit, task.time_limit),
            working=first(options.working_limit, task.working_limit),
            cost=first(options.cost_limit, task.cost_limit),
        )


class PreparedTask:
    """Everything that the episodes of a task share.

    Args:
        task: The task.
        options: How episodes are run.
        solver: Replaces the task's solver, as ``inspect eval --solver`` does.
        sandbox: Replaces the task's sandbox, as ``inspect eval --sandbox`` does, also by a
            plugin's providers. ``False`` runs without any, whatever task and samples ask for.
        keep_log: Keep each episode's events, for ``EpisodeResult.build_log``.
        first_calls: Only first model calls are wanted; the libraries of providers are not loaded.

    Attributes:
        task: The task itself.
        name: Its name, as in logs.
        options: How episodes are run.
        solver: What replaces the task's solver, if anything does.
        limits: The limits of every sample.
        scorers: The scorers, guarded against asking the policy to grade itself.
        sandbox: The task's sandbox after overrides; a sample may have another.
        score_files: Files that are scored in a clean sandbox; ``None`` to score where it worked.
        monitors: What watches its episodes.
        reads_events: Whether an episode has read its own transcript, or a monitor may.
        run_id: Id that Inspect's hooks on samples are given, as that of the run and of the eval.
        calls_hooks: Whether there are such hooks.
        keep_log: Whether its episodes keep their events.
        first_calls: Whether its episodes end at their first model call, and load no providers.
    """

    def __init__(
        self,
        task: Task,
        *,
        options: EpisodeOptions | None = None,
        solver: SolverLike | None = None,
        sandbox: SandboxEnvironmentType | Mapping[str, str] | Literal[False] | None = None,
        keep_log: bool = False,
        first_calls: bool = False,
    ) -> None:
        require_tried()
        self.task = task
        self.name = task.name
        self.options = options = options or EpisodeOptions()
        self.limits = SampleLimits.of(task, options)
        self.solver = _as_solver(solver)
        self.plan = internals.resolve_plan(task, self.solver)
        self.scorers = _guarded_scorers(task)
        self.run_dir = internals.task_run_dir(task)
        self.without_sandbox = sandbox is False
        self._providers = find_providers(sandbox)
        of_eval: Any = None if self._providers is not None else sandbox
        self.sandbox = None if sandbox is False else _resolve_sandbox(task, of_eval)
        self.config: GenerateConfig = task.config
        self.merged_configs = MergedConfigs()
        self.count_tokens: Callable[[str], int] | None = None
        self.context_window: int | None = None
        self.first_calls = first_calls
        self.run_id = internals.unique_id()
        self.calls_hooks = not first_calls and internals.hooks_are_on()
        self.keep_log = keep_log or self.calls_hooks
        if not first_calls:
            _load_for_episodes()
        self.monitors = resolve_monitors(task, options.sentinel)
        self.reads_events = bool(self.monitors)
        self.side_models = read_side_models(options.side_models)
        self.model_roles = resolve_roles(task.model_roles, options.model_roles)
        check_side_roles(self.side_models, self.model_roles)
        self._role_book = RoleBook(self.model_roles, task=self.name)
        self.score_on_error = options.score_on_error or bool(task.score_on_error)
        self.score_files = _files_to_score(task, options)
        if self.limits.cost is not None:
            _require_prices(task.name, self.model_roles)
        _name_what_is_an_evals(task)

    def enter_context(self, model: PolicyModel) -> None:
        """Bind the model, roles, approval and ``generate`` to the current context."""
        internals.enter_task_context(
            model,
            self._role_book,
            self.config,
            self.task,
            self.monitors.root,
        )
        internals.set_sandbox_limits()

    def note_reading(self) -> None:
        """Note that an episode has read its transcript: the later ones keep all of theirs."""
        self.reads_events = True

    def generate_with(self, model: PolicyModel) -> Generate:
        """Make the ``generate`` function that solvers receive."""

        # no coroutine of its own, which each waiting episode would keep
        def generate(
            state: TaskState,
            tool_calls: Literal["loop", "single", "none"] = "loop",
            **kwargs: Any,
        ) -> Coroutine[Any, Any, TaskState]:
            kwargs.pop("cache", None)
            return internals.task_generate(
                model=model,
                state=state,
                tool_calls=tool_calls,
                cache=False,
                config=self.config.merge(GenerateConfig(**kwargs)) if kwargs else self.config,
            )

        return generate

    def asks_for_sandbox(self, sample: Sample) -> bool:
        """Whether the task or a sample names a sandbox."""
        return not self.without_sandbox and not (self.sandbox is None and sample.sandbox is None)

    async def sandbox_of(self, sample: Sample) -> SandboxEnvironmentSpec | None:
        """Return the sandbox of a sample: the task's, the sample's own, or none."""
        if not self.asks_for_sandbox(sample):
            return None
        spec = await internals.resolve_sandbox(self.sandbox, sample, self.name)
        if spec is not None and spec.config is None and self.sandbox is None:
            # a sample that only names a provider still gets the task folder's compose file
            spec = internals.resolve_task_sandbox(self.task, spec)
        return spec if spec is None or self._providers is None else self._providers(spec)


def _files_to_score(task: Task, options: EpisodeOptions) -> Sequence[str] | None:
    """Return the files to copy into a clean sandbox, by the options or the task's metadata."""
    of_task = task.metadata or {}
    where = options.score_sandbox or of_task.get("score_sandbox") or "same"
    if where not in ("same", "fresh"):
        raise ConfigError(f"score_sandbox must be 'same' or 'fresh', got {where!r}")
    files = options.score_files or of_task.get("score_files") or ()
    if isinstance(files, str) or not all(isinstance(each, str) and each for each in files):
        raise ConfigError(f"score_files is a list of paths and patterns, got {files!r}")
    if options.score_files and where == "same" and options.score_sandbox is None:
        raise ConfigError("score_files are for a clean sandbox: score_sandbox='fresh'")
    return tuple(files) if where == "fresh" else None


@functools.cache
def _load_for_episodes() -> None:
    """Import what the first episode of a process would import while the event loop waits.

    Inspect loads all extensions when it first looks for hooks, and its providers' libraries when
    it sets up the state that they keep per sample.
    """
    internals.somebody_watches_model_calls()
    copy_context().run(internals.init_sample_assistant_internal)


def _resolve_sandbox(
    task: Task, sandbox: SandboxEnvironmentType | None
) -> SandboxEnvironmentSpec | None:
    try:
        return internals.resolve_task_sandbox(task, sandbox)
    except ValueError as error:
        raise ConfigError(f"task {task.name!r}: {error}") from error


def _as_solver(solver: SolverLike | None) -> Solver | None:
    if solver is None:
        return None
    parts = solver if isinstance(solver, Sequence) and not isinstance(solver, str) else [solver]
    for part in parts:
        if not callable(part) or isinstance(part, type):
            raise ConfigError(f"solver: {part!r:.80} is neither a solver nor an agent")
    if isinstance(solver, Sequence) and not callable(solver):  # a Chain is both
        return chain(list(solver))
    return as_solver(solver) if is_agent(solver) else cast(Solver, solver)


def resolve_roles(
    of_task: Mapping[str, Any] | None, of_caller: Mapping[str, Any]
) -> dict[str, Model | list[Model]]:
    """Merge roles, the caller's over the task's, and turn names and mappings into models."""
    roles: dict[str, Model | list[Model]] = {}
    for name, bound in {**(of_task or {}), **of_caller}.items():
        if bound is None or bound == []:
            raise ConfigError(f"model role {name!r} = {bound!r}: name a model, or leave it out")
        try:
            several = bound if isinstance(bound, list) else [bound]
            models = [model_of_role(name, model) for model in several]
            roles[name] = models if len(models) > 1 else models[0]
        except Exception as error:
            # a missing package, key or provider; each raises its own kind of error
            reason = internals.in_one_line(error)
            raise ConfigError(f"model role {name!r} = {bound!r}: {reason}") from error
    return roles


def _require_prices(task: str, roles: Mapping[str, Model | list[Model]]) -> None:
    """Refuse a cost limit that could never be reached, as an eval does."""
    models = [model for bound in roles.values() for model in _list_models(bound)]
    names = [POLICY_MODEL, *dict.fromkeys(str(model) for model in models)]
    priced = {name for name in names if (info := get_model_info(name)) is not None and info.cost}
    if missing := [name for name in names if name not in priced]:
        raise ConfigError(
            f"task {task!r}: cost_limit needs prices for all models, and there are none for "
            f"{', '.join(missing)}. Give them with set_model_info() of inspect_ai.model "
            f"(the model under training is {POLICY_MODEL!r}), or drop the limit"
        )


def _list_models(bound: Model | list[Model]) -> list[Model]:
    return bound if isinstance(bound, list) else [bound]


_named: set[tuple[str, str]] = set()


def _name_what_is_an_evals(task: Task) -> None:
    """Warn, once per task, about its settings that have no effect on episodes."""
    for option, set_to, why in (
        ("early_stopping", task.early_stopping, "the trainer decides which samples are run"),
        ("checkpoint", task.checkpoint, "an episode that is cut off is not resumed"),
    ):
        if set_to and (task.name, option) not in _named:
            _named.add((task.name, option))
            logger.warning("task %r: its %s has no effect here; %s", task.name, option, why)


def _guarded_scorers(task: Task) -> list[NamedScorer]:
    named: list[NamedScorer] = []
    for scorer in task.scorer or []:
        name = internals.unique_scorer_name(scorer, [other.name for other in named])
        metrics = task.metrics or registry_info(scorer).metadata.get("metrics")
        named.append(NamedScorer(name, _guard_scorer(name, scorer), _metric_keys(metrics)))
    return named


def _metric_keys(metrics: object) -> tuple[str, ...]:
    """Keys of a dict score that metrics name; patterns (``*``) are left out."""
    groups = metrics if isinstance(metrics, Sequence) else [metrics]
    keys = [key for group in groups if isinstance(group, Mapping) for key in group]
    return tuple(key for key in keys if not set(key) & set("*?["))


def _guard_scorer(name: str, scorer: Scorer) -> Scorer:
    """Wrap a scorer so that it cannot ask the policy; keeps its registry entry."""
    call: Callable[[TaskState, Target], Awaitable[Score | None]] = scorer

    @functools.wraps(scorer)
    async def guarded(state: TaskState, target: Target) -> Score | None:
        with scoring(name):
            return await call(state, target)

    return guarded
