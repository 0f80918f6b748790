"""Adds the RL method and command to Inspect once it is imported; run by the start-up file.

Inspect has no hook for either: ``Task`` is a plain class, and Inspect's command line loads
no plugins. So the start-up file (``_autorun.py``) sends the imports of two modules through
:func:`find_spec`, which loads them as usual and then adds what is missing. Nothing
heavy is imported here, and nothing of Inspect before Inspect itself is imported.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, Unpack

if TYPE_CHECKING:
    from inspect_ai import Task
    from tinker_cookbook.renderers import Renderer

    from inspect_tinker_plugin.options import DatasetKeywords
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
        # resources, source text and code of the module, for callers that only look it up
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
    # An error in this package must not keep anybody from importing Inspect.
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
    """Does the same as the start-up file's class of the same name, if there is no start-up file."""

    find_spec = staticmethod(find_spec)


def install() -> None:
    """Add method and command to modules that are imported already, and to later imports.

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
        from inspect_tinker_plugin.options import spell_out_options

        setattr(task, METHOD, spell_out_options(as_rl_dataset))


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
    self: Task, renderer: Renderer, **options: Unpack[DatasetKeywords]
) -> InspectRLDataset:
    """Turn this task into a dataset of Tinker environments (added by inspect-tinker-plugin).

    Args:
        self: The task.
        renderer: A ``tinker_cookbook`` renderer; turns messages into tokens and back.
        {options}

    Returns:
        An ``InspectRLDataset``, a ``tinker_cookbook.rl.types.RLDataset``.

    Raises:
        ConfigError: The task, the renderer or an option cannot be used.
    """
    from inspect_tinker_plugin.options import DatasetOptions, read_keywords
    from inspect_tinker_plugin.rl.dataset import build_dataset

    return build_dataset(self, renderer, DatasetOptions(**read_keywords(options)))
