"""What the start-up file leads to: once Inspect is imported, it gains the RL method and command.

Inspect has no hook for either: ``Task`` is a plain class, and Inspect's command line loads
no plugins. So the start-up file (``_autorun.py``) sends the imports of two modules through
:func:`find_spec`, which lets them load as always and then adds what is missing. Nothing
heavy is imported here, and nothing of Inspect before Inspect itself was asked for.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from inspect_ai import Task
    from inspect_ai.model import Model
    from inspect_ai.util import SandboxEnvironmentType
    from tinker_cookbook.renderers import Renderer
    from tinker_cookbook.rl.rollout_limits import RolloutLimits

    from inspect_tinker_plugin.config import OnError
    from inspect_tinker_plugin.episode.task import SolverLike
    from inspect_tinker_plugin.rewards import GroupRewardSpec, RewardSpec
    from inspect_tinker_plugin.rl.dataset import InspectRLDataset

METHOD = "as_rl_dataset"
COMMAND = "rl"

_search = threading.local()


def find_spec(
    name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
) -> ModuleSpec | None:
    """Find a module as the other finders do, and run its addition after it is loaded.

    Returns:
        The spec of the next finder that knows the module, with a loader that adds ours
        once; ``None`` when no finder does, or when this search is already under way (a
        start-up file that is installed twice).
    """
    if name not in ADDITIONS or getattr(_search, "busy", False):
        return None
    _search.busy = True
    try:
        spec = _next_spec(name, path, target)
    finally:
        _search.busy = False
    if spec is not None and spec.loader is not None:
        spec.loader = _AddingLoader(spec.loader, ADDITIONS[name])
    return spec


def _next_spec(
    name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    for finder in list(sys.meta_path):
        find = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = find(name, path, target) if find is not None else None
        if spec is not None:
            return spec
    return None


class _AddingLoader(Loader):
    """Stands in for a module's own loader until the module has been executed."""

    def __init__(self, loader: Loader, addition: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._addition = addition

    def __getattr__(self, name: str) -> Any:
        # resources, source text and code of the module, for whoever only looks it up
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _apply(self._addition, module)


def _apply(addition: Callable[[ModuleType], None], module: ModuleType) -> None:
    # A fault of ours must not keep anybody from importing Inspect.
    try:
        addition(module)
    except Exception as error:
        warnings.warn(
            f"inspect-tinker-plugin could not extend {module.__name__}: {error!r}. "
            f"The function inspect_tinker_plugin.as_rl_dataset and the command inspect-rl "
            f"do the same.",
            RuntimeWarning,
            stacklevel=2,
        )


class InspectRLFinder:
    """Does what the start-up file's class of the same name does, where there is none."""

    find_spec = staticmethod(find_spec)


def install() -> None:
    """Add method and command to what is imported already, and see to what will be.

    Importing the package calls it, for places without start-up files (``python -S``, a
    source folder on ``PYTHONPATH``). Inspect itself is not imported; safe to call again.
    """
    if not any(getattr(f, "__name__", None) == InspectRLFinder.__name__ for f in sys.meta_path):
        sys.meta_path.insert(0, InspectRLFinder)
    for name, addition in ADDITIONS.items():
        module = sys.modules.get(name)
        spec = getattr(module, "__spec__", None)
        # A module in the middle of its import gets its addition at the end of it.
        if module is not None and not getattr(spec, "_initializing", False):
            _apply(addition, module)


def _add_method(module: ModuleType) -> None:
    task = module.Task
    if not hasattr(task, METHOD):
        setattr(task, METHOD, as_rl_dataset)


def _add_command(module: ModuleType) -> None:
    group = module.inspect
    if COMMAND not in group.commands:
        from inspect_tinker_plugin.cli.main import rl

        group.add_command(rl, COMMAND)


# The second name is private: Inspect's command group has no public one. Only its
# attribute `inspect` is used, and a release without it costs a warning, no more.
ADDITIONS: dict[str, Callable[[ModuleType], None]] = {
    "inspect_ai": _add_method,
    "inspect_ai._cli.main": _add_command,
}


def as_rl_dataset(
    self: Task,
    renderer: Renderer,
    *,
    batch_size: int = 1,
    group_size: int = 1,
    max_samples: int | None = None,
    sample_ids: Sequence[int | str] | None = None,
    epochs: int = 1,
    shuffle: bool = False,
    seed: int | None = None,
    solver: SolverLike | None = None,
    max_turns: int | None = None,
    sandbox: SandboxEnvironmentType | None = None,
    sandbox_config: Any = None,
    model_roles: Mapping[str, str | Model | list[str | Model]] | None = None,
    message_limit: int | None = None,
    token_limit: int | None = None,
    time_limit: int | None = None,
    working_limit: int | None = None,
    max_sandboxes: int | None = None,
    reward: RewardSpec = "mean",
    group_reward: GroupRewardSpec | None = None,
    tool_executor: Any = None,
    on_error: OnError = "raise",
    rollout_limits: RolloutLimits | None = None,
    log_dir: str | Path | None = None,
) -> InspectRLDataset:
    """Turn this task into a dataset of Tinker environments (added by inspect-tinker-plugin).

    Args:
        self: The task.
        renderer: A ``tinker_cookbook`` renderer; turns messages into tokens and back.
        batch_size: Groups a batch.
        group_size: Episodes a group, all of the same sample.
        max_samples: Use only this many samples.
        sample_ids: Use only the samples with these ids.
        epochs: Passes over the samples.
        shuffle: Shuffle the samples anew in each epoch.
        seed: Makes the shuffling repeatable.
        solver: Replaces the task's solver, as ``inspect eval --solver`` does.
        max_turns: Model calls that an episode may make.
        sandbox: Replaces the task's sandbox, as ``inspect eval --sandbox`` does.
        sandbox_config: Configuration of ``sandbox``, e.g. a compose file.
        model_roles: Models by role, e.g. ``{"grader": "openai/gpt-4o"}``.
        message_limit: Messages in a conversation.
        token_limit: Tokens of an episode.
        time_limit: Seconds of wall clock of an episode.
        working_limit: Seconds of working time of an episode.
        max_sandboxes: Sandboxes alive at once for one provider.
        reward: Name of a reward aggregator, an expression, or an aggregator.
        group_reward: Aggregator that sees the whole group, by name or as an object.
        tool_executor: Decides how tool calls are carried out, by name or as an object.
        on_error: ``"raise"``, or a penalty by cause of the failure.
        rollout_limits: The cookbook's own limits of a rollout.
        log_dir: Write an ``.eval`` log a batch into this folder.

    Returns:
        An ``InspectRLDataset``, a ``tinker_cookbook.rl.types.RLDataset``.

    Raises:
        ConfigError: The task, the renderer or an option cannot be used.
    """
    from inspect_tinker_plugin.rl.dataset import as_rl_dataset as build

    return build(
        self,
        renderer,
        batch_size=batch_size,
        group_size=group_size,
        max_samples=max_samples,
        sample_ids=sample_ids,
        epochs=epochs,
        shuffle=shuffle,
        seed=seed,
        solver=solver,
        max_turns=max_turns,
        sandbox=sandbox,
        sandbox_config=sandbox_config,
        model_roles=model_roles,
        message_limit=message_limit,
        token_limit=token_limit,
        time_limit=time_limit,
        working_limit=working_limit,
        max_sandboxes=max_sandboxes,
        reward=reward,
        group_reward=group_reward,
        tool_executor=tool_executor,
        on_error=on_error,
        rollout_limits=rollout_limits,
        log_dir=log_dir,
    )
