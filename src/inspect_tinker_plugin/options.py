"""Every option of a dataset, declared once: name, type, default, help, and commands that have it.

Python, the command line, ``rl.train.Config`` and the documentation take all facts about an option
from here. A field is declared with :func:`option`; `DatasetKeywords` repeats names and types for
type checkers, and a test keeps both in step.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from inspect_tinker_plugin.contracts.errors import ConfigError, ErrorPolicy, OnError
from inspect_tinker_plugin.contracts.policy import read_side_models
from inspect_tinker_plugin.contracts.wording import suggestion

if TYPE_CHECKING:
    from inspect_ai.util import SandboxEnvironmentType, TokenLimit
    from tinker_cookbook.rl.rollout_limits import RolloutLimits

    from inspect_tinker_plugin.contracts.episodes import RoleModel, SolverLike
    from inspect_tinker_plugin.contracts.hooks import SamplerSpec
    from inspect_tinker_plugin.contracts.rewards import GroupRewardSpec, RewardSpec

__all__ = [
    "COMMANDS",
    "DatasetKeywords",
    "DatasetOptions",
    "EpisodeOptions",
    "Option",
    "Selection",
    "declared_options",
    "option",
    "options_of",
    "read_keywords",
    "read_token_limit",
    "spell_out_options",
]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

COMMANDS = ("audit", "bench", "check", "export", "rollout", "serve", "train")
"""Commands that take options of a dataset."""

RUNNING = ("bench", "check", "rollout", "serve", "train")
"""Commands that run episodes to their end."""

ROLLING = ("rollout", "serve", "train")
"""Commands that make groups of rollouts with rewards."""


def option(default: T, help: str, *commands: str, factory: Callable[[], T] | None = None) -> T:
    """Declare an option as a field of a dataclass.

    Args:
        default: Its default.
        help: One sentence: what it does; used everywhere.
        commands: Commands of ``inspect rl`` that have it; Python has all of them.
        factory: Makes the default, if it is a mutable object.
    """
    about = {"help": help, "commands": commands}
    if factory is not None:
        return field(default_factory=factory, metadata=about)
    return field(default=default, metadata=about)


@dataclass(frozen=True, kw_only=True)
class EpisodeOptions:
    """How episodes of one dataset are run; plain values, shared by all of them."""

    max_turns: int | None = option(
        None, "Maximum model calls per episode; then its state is scored.", *ROLLING
    )
    message_limit: int | None = option(None, "Maximum messages per conversation.", *RUNNING)
    token_limit: int | str | TokenLimit | None = option(
        None,
        "Maximum tokens per episode, over all models: a number, or as `inspect eval` takes it "
        "(`500k`, `output:1m`, `(input*0.1)+output:1m`).",
        *RUNNING,
    )
    time_limit: int | None = option(
        None,
        "Maximum seconds of wall-clock time per episode, including sampling.",
        "export",
        *RUNNING,
    )
    working_limit: int | None = option(
        None,
        "Maximum seconds of working time per episode, without waiting for models and retries.",
        *RUNNING,
    )
    cost_limit: float | None = option(
        None, "Maximum cost per episode in US dollars, as Inspect counts it.", *RUNNING
    )
    score_on_error: bool = option(
        False,
        "Score the state of an episode whose solver raised an error, for its log and metrics.",
        *RUNNING,
    )
    score_sandbox: str | None = option(
        None,
        "Where scorers work: `same` (where the policy did) or `fresh` (a clean sandbox with the "
        "sample's files and set-up, and `score_files` of the policy's).",
        "audit",
        *RUNNING,
    )
    score_files: Sequence[str] | None = option(
        None,
        "Files that a fresh sandbox takes over from the policy's: paths and patterns.",
        "audit",
        *RUNNING,
    )
    sentinel: Any = option(
        None,
        "Watches episodes instead of the task's own sentinel: a monitor or protocol by name, or a "
        "configuration file. Monitors alone are only observed.",
        *RUNNING,
    )
    max_sandboxes: int | None = option(
        None,
        "Maximum sandboxes in parallel (per provider and process).",
        *("audit", "export", *ROLLING),
    )
    max_subprocesses: int | None = option(
        None,
        "Maximum subprocesses in parallel (per process; as many as processor cores by default). "
        "A program in a `local` or `docker` sandbox counts while it runs, also while it waits for "
        "the model.",
        "audit",
        *RUNNING,
    )
    stop_timeout: float = option(
        300.0,
        "Seconds for scorers and clean-up after the trainer stopped stepping an episode.",
        *ROLLING,
    )
    model_roles: Mapping[str, RoleModel | list[RoleModel]] = option(
        {},
        "Models by role, such as a grader, over the task's own: a name, or a mapping with `model` "
        "and its options.",
        *COMMANDS,
        factory=dict,
    )
    side_models: Mapping[str, str] = option(
        {},
        "What answers a program that asks for another model than `inspect`, by name or pattern: "
        "policy (untrained), train, role:NAME, reply:TEXT or refuse.",
        *ROLLING,
        factory=dict,
    )


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Selects samples, with the words and the meaning of ``inspect eval``.

    Raises:
        ConfigError: Two of the choices exclude each other, or one of them chooses nothing.
    """

    limit: int | tuple[int, int] | None = option(
        None, "Use only the first samples, or a range of them.", *COMMANDS
    )
    sample_id: str | int | Sequence[str | int] | None = option(
        None,
        "Use only samples with these ids or patterns (on the command line also @FILE: exact ids, "
        "one per line), in the dataset's order.",
        *COMMANDS,
    )
    sample_ids: Sequence[int | str] | None = option(
        None, "Use only samples with these exact ids, in this order."
    )
    sample_shuffle: bool | int | None = option(
        None, "Shuffle the samples before the limit is applied; a number is the seed.", *COMMANDS
    )

    def __post_init__(self) -> None:
        _check_limit(self.limit)
        given = {"sample_id": self.patterns, "sample_ids": self.sample_ids}
        by_id = [name for name in given if getattr(self, name) is not None]
        if not by_id:
            return
        if not given[by_id[0]]:
            raise ConfigError(f"{by_id[0]} is empty, so there is no sample; None takes all of them")
        if others := [
            name
            for name in (*by_id[1:], "limit", "sample_shuffle")
            if getattr(self, name) not in (None, False)
        ]:
            raise ConfigError(f"{by_id[0]} and {others[0]} exclude each other; give one of them")

    @property
    def patterns(self) -> list[str | int]:
        """The patterns of ``sample_id`` as a list."""
        wanted = self.sample_id
        return [wanted] if isinstance(wanted, str | int) else list(wanted or ())


@dataclass(frozen=True, kw_only=True)
class DatasetOptions(Selection, EpisodeOptions):
    """How a task becomes batches of groups of episodes.

    ``P`` is the number of groups per batch and ``G`` the number of episodes per group, as
    in the cookbook.

    Raises:
        ConfigError: An option has an impossible value, or two exclude each other.
    """

    batch_size: int = option(1, "Groups per batch (P).", "train")
    group_size: int = option(1, "Episodes per group (G), all of the same sample.", *ROLLING)
    epochs: int = option(1, "Passes over the samples.", "train")
    shuffle: bool = option(False, "Visit the samples in a different order in every epoch.", "train")
    seed: int | None = option(None, "Seed of the order of the epochs.", "train")
    sampler: SamplerSpec | None = option(
        None,
        "Chooses the samples of each batch by the rewards so far, such as `curriculum`, instead of "
        "passes over them.",
        "train",
    )
    sampler_logs: Sequence[str] | None = option(
        None, "Logs and folders of logs from which the sampler learns beforehand.", "train"
    )
    solver: SolverLike | None = option(None, "Replaces the task's solver.", *COMMANDS)
    sandbox: SandboxEnvironmentType | Mapping[str, str] | None = option(
        None, "Replaces the task's sandbox: a provider of Inspect or of a plugin.", *COMMANDS
    )
    sandbox_config: Any = option(None, "Configuration of the sandbox, such as a compose file.")
    tool_executor: Any = option(None, "Carries out tool calls instead of Inspect.", *ROLLING)
    reward: RewardSpec = option("mean", "How scores become a reward.", "audit", *ROLLING)
    group_reward: GroupRewardSpec | None = option(
        None, "How the rewards of a whole group are revised.", *ROLLING
    )
    monitor_penalty: Mapping[str, float] = option(
        {},
        "Trains against a monitor of the sentinel: adds a negative weight times its highest "
        "suspicion of the episode.",
        *ROLLING,
        factory=dict,
    )
    on_error: OnError = option(
        "raise",
        "Reward of a failed episode, for all causes or by cause, instead of its error.",
        *ROLLING,
    )
    rollout_limits: RolloutLimits | None = option(
        None, "The cookbook's own budgets of a rollout, enforced by its runner."
    )
    context_window: int | None = option(
        None,
        "Tokens that the model takes, prompt and reply together: a model call without room for a "
        "reply is answered with `model_length`, as in an eval.",
        *ROLLING,
    )
    log_dir: str | Path | None = option(
        None, "Folder for one .eval log per batch, for inspect view.", "rollout", "serve"
    )

    def __post_init__(self) -> None:
        for name in ("shuffle", "score_on_error"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("batch_size", "group_size", "epochs"):
            _require_whole(name, getattr(self, name))
        for name, least in LEAST.items():
            if getattr(self, name) is not None:
                _require_whole(name, getattr(self, name), least)
        if self.token_limit is not None:
            read_token_limit(self.token_limit)
        if self.cost_limit is not None:
            _require_amount("cost_limit", self.cost_limit, or_zero=True)
        _require_amount("stop_timeout", self.stop_timeout)
        if self.sandbox_config is not None:
            # Folded into the sandbox, so that there is one place to look it up.
            object.__setattr__(self, "sandbox", _with_config(self.sandbox, self.sandbox_config))
            object.__setattr__(self, "sandbox_config", None)
        if self.sampler_logs and self.sampler is None:
            raise ConfigError("sampler_logs needs a sampler, e.g. sampler='curriculum'")
        if isinstance(self.sampler_logs, str):
            object.__setattr__(self, "sampler_logs", [self.sampler_logs])
        ErrorPolicy.of(self.on_error)
        read_side_models(self.side_models)
        super().__post_init__()

    @property
    def selection(self) -> Selection:
        """The choice of samples alone."""
        return Selection(**{each.name: getattr(self, each.name) for each in fields(Selection)})


LEAST = {
    "max_sandboxes": 1,
    "max_subprocesses": 1,
    "max_turns": 1,
    "message_limit": 0,
    "time_limit": 0,
    "working_limit": 0,
    "context_window": 1,
}
"""The least that an option may say; limits of Inspect may be 0, as in an eval."""


def _check_limit(limit: object) -> None:
    if limit is None:
        return
    whole = [limit] if not isinstance(limit, tuple) else [limit[0] + 1, limit[1]]
    if any(isinstance(each, bool) or not isinstance(each, int) or each < 1 for each in whole):
        raise ConfigError(f"limit must be a whole number of at least 1, or a range, got {limit!r}")
    if isinstance(limit, tuple) and (len(limit) != 2 or limit[0] >= limit[1]):
        raise ConfigError(f"limit {limit!r} leaves no sample; a range is (from, to), from 0")


def _with_config(sandbox: Any, config: Any) -> tuple[str, Any]:
    if not isinstance(sandbox, str):
        raise ConfigError(
            "sandbox_config needs sandbox to name a provider, e.g. sandbox='docker', "
            "sandbox_config='compose.yaml'"
        )
    return (sandbox, config)


def _require_whole(name: str, value: object, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")


def read_token_limit(limit: int | str | TokenLimit) -> tuple[int, str]:
    """Read a limit of tokens as Inspect does.

    Returns:
        The number of tokens, and which of them count: ``all``, ``output`` or a formula.

    Raises:
        ConfigError: Inspect does not take it, or it is below 0.
    """
    from inspect_ai import Task

    try:
        read = Task(token_limit=limit)  # the public way to Inspect's own parser
    except ValueError as error:
        raise ConfigError(f"token_limit: {error}") from error
    _require_whole("token_limit", read.token_limit, 0)
    assert read.token_limit is not None
    return read.token_limit, read.token_limit_type or "all"


def _require_amount(name: str, value: object, *, or_zero: bool = False) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not (0 < value < math.inf or (or_zero and value == 0))
    ):
        least = "of at least 0" if or_zero else "above 0"
        raise ConfigError(f"{name} must be a number {least}, got {value!r}")


class DatasetKeywords(TypedDict, total=False):
    """The options as keywords, for type checkers and editors; :class:`DatasetOptions` has the rest.

    A test keeps the two consistent.
    """

    max_turns: int | None
    message_limit: int | None
    token_limit: int | str | TokenLimit | None
    time_limit: int | None
    working_limit: int | None
    cost_limit: float | None
    score_on_error: bool
    score_sandbox: str | None
    score_files: Sequence[str] | None
    sentinel: Any
    max_sandboxes: int | None
    max_subprocesses: int | None
    stop_timeout: float
    model_roles: Mapping[str, RoleModel | list[RoleModel]]
    side_models: Mapping[str, str]
    limit: int | tuple[int, int] | None
    sample_id: str | int | Sequence[str | int] | None
    sample_ids: Sequence[int | str] | None
    sample_shuffle: bool | int | None
    batch_size: int
    group_size: int
    epochs: int
    shuffle: bool
    seed: int | None
    sampler: SamplerSpec | None
    sampler_logs: Sequence[str] | None
    solver: SolverLike | None
    sandbox: SandboxEnvironmentType | Mapping[str, str] | None
    sandbox_config: Any
    tool_executor: Any
    reward: RewardSpec
    group_reward: GroupRewardSpec | None
    monitor_penalty: Mapping[str, float]
    on_error: OnError
    rollout_limits: RolloutLimits | None
    context_window: int | None
    log_dir: str | Path | None


@dataclass(frozen=True)
class Option:
    """One declared option."""

    name: str
    annotation: str
    """Its type as it is written in the declaration."""

    default: Any
    help: str
    commands: tuple[str, ...]
    """Commands of ``inspect rl`` that have it."""


def declared_options() -> list[Option]:
    """Return all options: those of the dataset, then those of its episodes."""
    of_episodes = {each.name for each in fields(EpisodeOptions)}
    return sorted(options_of(DatasetOptions), key=lambda each: each.name in of_episodes)


def options_of(declaration: type) -> list[Option]:
    """Return the fields of a dataclass that are declared as options, in their order."""
    return [
        Option(
            each.name,
            str(each.type),
            each.default_factory() if each.default_factory is not MISSING else each.default,
            each.metadata["help"],
            each.metadata["commands"],
        )
        for each in fields(declaration)
        if "help" in each.metadata
    ]


def read_keywords(
    keywords: Mapping[str, Any], *, function: str = "as_rl_dataset"
) -> dict[str, Any]:
    """Return a caller's keywords, which are options of :class:`DatasetOptions`.

    Raises:
        TypeError: There is no option of this name; a close one is suggested.
    """
    known = {each.name for each in declared_options()}
    for name in keywords:
        if name not in known:
            raise TypeError(
                f"{function}() got an unexpected keyword argument {name!r}."
                f"{suggestion(name, known)}"
            )
    return dict(keywords)


def spell_out_options(function: F) -> F:
    """Spell out ``**options`` in a function's signature, and ``{options}`` in its docstring.

    So editors and ``help()`` show every option.
    """
    given = inspect.signature(function)
    own = [each for each in given.parameters.values() if each.kind is not each.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=each.default,
            annotation=each.annotation,
        )
        for each in declared_options()
    ]
    lines = [f"{each.name}: {each.help}" for each in declared_options()]
    function.__doc__ = re.sub(
        r"( *){options}",
        lambda found: "\n".join(found[1] + line for line in lines),
        function.__doc__ or "",
    )
    function.__signature__ = given.replace(parameters=[*own, *options])  # type: ignore[attr-defined]  # PEP 362
    return function
