"""The options as keywords of functions: for type checkers, signatures, docstrings and messages."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from inspect_tinker_plugin.contracts.wording import suggestion
from inspect_tinker_plugin.options.declared import DatasetOptions, EpisodeOptions

if TYPE_CHECKING:
    from inspect_ai.model import Model
    from inspect_ai.util import SandboxEnvironmentType
    from tinker_cookbook.rl.rollout_limits import RolloutLimits

    from inspect_tinker_plugin.contracts.episodes import SolverLike
    from inspect_tinker_plugin.contracts.errors import OnError
    from inspect_tinker_plugin.contracts.hooks import SamplerSpec
    from inspect_tinker_plugin.contracts.rewards import GroupRewardSpec, RewardSpec

F = TypeVar("F", bound=Callable[..., Any])


class DatasetKeywords(TypedDict, total=False):
    """The options as keywords, for type checkers and editors; :class:`DatasetOptions` has the rest.

    A test keeps the two consistent.
    """

    max_turns: int | None
    message_limit: int | None
    token_limit: int | None
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
    model_roles: Mapping[str, str | Model | list[str | Model]]
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
