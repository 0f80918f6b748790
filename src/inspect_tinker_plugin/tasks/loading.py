"""Creates tasks with Inspect's own loader; errors say what to change."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inspect_ai import Task
from inspect_ai.model import GenerateConfig, Model, get_model
from inspect_ai.solver import Solver
from inspect_ai.util import SandboxEnvironmentSpec, registry_info

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.errors import (
    ConfigError,
    InspectRLError,
    PluginError,
    TaskError,
    TaskNotFoundError,
)
from inspect_tinker_plugin.contracts.policy import POLICY_MODEL
from inspect_tinker_plugin.contracts.sandboxes import SandboxMapper
from inspect_tinker_plugin.contracts.wording import place_in_code, suggestion
from inspect_tinker_plugin.plugins.manager import default_plugins


def create_registered(name: str, args: Mapping[str, Any], run_dir: str | None) -> Task:
    """Create a task by its registered name, in the folder that it was first named in."""
    with _loading(name), in_folder(run_dir):
        if not name.startswith("hf/"):
            _check_args(name, find_registered(name), args)
        return _one_task(name, internals.load_task_spec(name, dict(args)))


def find_registered(name: str) -> object:
    """Return the function of a registered task.

    Raises:
        TaskNotFoundError: Nothing is registered by this name.
    """
    function: object = internals.registry_lookup("task", name)
    if function is None:
        raise TaskNotFoundError(_describe_unknown(name))
    return function


_loaded: dict[Path, None] = {}
"""Files of tasks that this process has run, in order."""


def loaded_files() -> list[Path]:
    """Return the files of tasks that this process has run: what they register has a name here."""
    return list(_loaded)


def load_files(files: Iterable[Path]) -> None:
    """Run files of tasks for the names that they register, unless they were run or are not here."""
    for file in files:
        if file not in _loaded and file.is_file():
            with _loading(file.name, "file"):
                internals.load_file_tasks(file)
            _loaded[file] = None


def create_from_file(file: Path, name: str, args: Mapping[str, Any]) -> Task:
    """Create a task of a file, which is run again in its own folder."""
    spec = f"{file.name}@{name}"
    with _loading(spec):
        internals.load_file_tasks(file)
        _loaded[file] = None
        function = internals.registry_lookup("task", name)
        if function is None:
            raise TaskNotFoundError(f"{file} declares {name!r}, but did not register it as a task.")
        _check_args(spec, function, args)
        return _one_task(spec, internals.create_file_tasks(file, [name], dict(args)))


def call_task_function(function: Callable[..., Task], args: Mapping[str, Any]) -> Task:
    """Call a function that returns a task."""
    name = getattr(function, "__name__", type(function).__name__)
    with _loading(name):
        _check_args(name, function, args)
        return _one_task(name, [function(**args)])


def create_solver(spec: str, args: Mapping[str, Any]) -> Solver:
    """Create the solver that ``--solver`` names: a registered name or ``file.py@solver``."""
    with _loading(spec, "solver"):
        return internals.solver_from_spec(
            internals.SolverSpec(spec, args=dict(args), args_passed=dict(args))
        )


def with_policy() -> AbstractContextManager[None]:
    """Have ``get_model()`` return the policy while a task or solver is made, as in an eval.

    What it returns asks the policy of whichever episode uses it.
    """
    return internals.bind_model(get_model(POLICY_MODEL))


def with_roles(roles: Mapping[str, Any] | None) -> AbstractContextManager[None]:
    """Have ``get_model(role=...)`` find these models for a while, as in an eval.

    Args:
        roles: Models by role; ``None`` leaves those that are bound.
    """
    return nullcontext() if roles is None else internals.bind_roles(_Roles(roles))


class _Roles(dict[str, Any]):
    """Model roles, whose names become models when they are asked for."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return the model of a role, or the first of several."""
        bound = super().get(key)
        if isinstance(bound, list):
            bound = bound[0] if bound else None
        if bound is None:
            return default
        with internals.bind_roles({}):  # a role that is bound comes before the name
            return model_of_role(key, bound)


def model_of_role(role: str, bound: Any) -> Model:
    """Return the model that a role is bound to; a copy of a model object, as in an eval.

    Args:
        role: The role.
        bound: A model, its name, or what ``inspect eval --model-role`` takes: a mapping with
            ``model``, ``model_args`` and options of generation.

    Raises:
        ValueError: A mapping names no model, or has an option that Inspect does not know.
    """
    if isinstance(bound, Model):  # its role is in the events and the usage of its calls
        own = copy(bound)
        own._set_role(role)
        return own
    if not isinstance(bound, Mapping):
        return get_model(bound, role=role)
    options = dict(bound)
    name, args = options.pop("model", None), options.pop("model_args", {})
    if name is None:
        raise ValueError("it names no model")
    config = GenerateConfig(**options)
    return get_model(name, role=role, config=config, memoize=False, **args)


def in_folder(folder: str | None) -> Any:
    """Change to a folder for a while, if one is given."""
    if folder is None or not Path(folder).is_dir() or Path(folder) == Path.cwd():
        return nullcontext()
    return internals.chdir(folder)


def _one_task(name: str, created: list[Any]) -> Task:
    if len(created) == 1 and isinstance(created[0], Task):
        return created[0]
    what = type(created[0]).__name__ if created else "nothing"
    raise TaskError(f"task {name!r} is not a Task: its function returned {what}.")


def _check_args(name: str, function: object, args: Mapping[str, Any]) -> None:
    """Refuse arguments that the function does not take; Inspect only warns, and drops them."""
    assert callable(function)
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for arg in args:
        if arg not in parameters:
            known = list(parameters)
            hint = suggestion(arg, known) if known else " It takes none."
            raise TaskError(f"task {name!r} has no argument {arg!r}.{hint}")
    missing = [
        p.name
        for p in parameters.values()
        if p.default is p.empty and p.kind is not p.VAR_POSITIONAL and p.name not in args
    ]
    if missing:
        raise TaskError(f"task {name!r} needs the argument {', '.join(map(repr, missing))}.")


def _describe_unknown(name: str) -> str:
    known = [
        registry_info(found).name
        for found in internals.registry_find(lambda info: info.type == "task")
    ]
    hint = suggestion(name, [each for each in known if ("/" in each) == ("/" in name)])
    if "/" in name and not hint:
        hint = f" Is the package {name.split('/')[0]!r} installed?"
    elif not hint:
        hint = " Tasks are named package/task or file.py@task."
    return f"there is no task {name!r}.{hint}"


@contextmanager
def _loading(name: str, kind: str = "task") -> Iterator[None]:
    """Report an error in a task's own code as one line, with its place in that code."""
    try:
        with with_policy():
            yield
    except InspectRLError:
        raise
    except internals.PrerequisiteError as error:
        raise TaskError(f"{kind} {name!r}: {internals.in_one_line(error)}") from error
    except (Exception, SystemExit) as error:  # sys.exit() in a script without a main guard
        text = " ".join(str(error).split())
        if "__registry_info__" in text:  # Inspect tags what it takes for a Task
            raise TaskError(
                f"task {name!r} is not a Task: its function returned something else."
            ) from error
        raise TaskError(
            f"{kind} {name!r} could not be created: {type(error).__name__}: {text}"
            f"{place_in_code(error, skipping=('/lib/python', '<frozen'))}"
        ) from error


def describe_part(part: object) -> object:
    """Return name and arguments of a solver or scorer; of a plain function, where it is defined."""
    if part is None:
        return None
    if isinstance(part, list | tuple):
        return [describe_part(each) for each in part]
    steps = getattr(part, "_solvers", None) or getattr(part, "steps", None)
    if isinstance(steps, list):
        return [describe_part(each) for each in steps]
    try:
        return registry_info(part).name, internals.registry_params(part)
    except ValueError:
        return getattr(part, "__module__", None), getattr(part, "__qualname__", type(part).__name__)


_HOOK = "inspect_rl_sandbox_providers"


@dataclass(frozen=True)
class ProviderMapping:
    """Providers by the type of sandbox that a task may ask for; picklable, as it holds names."""

    providers: Mapping[str, str]
    """Names of providers by the requested type; ``"*"`` for any other type."""

    def __post_init__(self) -> None:
        for name in self.providers.values():
            _mapper(name)  # raises if it is unknown

    def __call__(self, spec: SandboxEnvironmentSpec) -> SandboxEnvironmentSpec:
        """Map the specification of a task or a sample; types that are not named stay unchanged."""
        name = self.providers.get(spec.type, self.providers.get("*"))
        if name is None:
            return spec
        origin = default_plugins().catalogue(_HOOK).origins.get(name)
        who = f"sandbox provider {name!r}" + (f" ({origin})" if origin else "")
        try:
            mapped = _mapper(name)(spec)
        except (Exception, SystemExit) as ex:
            raise PluginError(f"{who} failed on {spec.type!r}: {type(ex).__name__}: {ex}") from ex
        if not isinstance(mapped, SandboxEnvironmentSpec):
            raise PluginError(
                f"{who} gave {mapped!r:.80} for {spec.type!r}, not a SandboxEnvironmentSpec"
            )
        if mapped.type != spec.type and not _known_to_inspect(mapped.type):
            raise PluginError(
                f"{who} gave the type {mapped.type!r}, which is not in "
                "Inspect's registry; register it with @sandboxenv and an inspect_ai entry point"
            )
        return mapped


def find_providers(sandbox: Any) -> ProviderMapping | None:
    """Return the plugins' providers that ``sandbox=`` names; ``None`` for what Inspect resolves.

    Args:
        sandbox: A plugin's provider by name, a mapping of types to providers, or what Inspect
            itself takes (a type that it knows, a specification, a tuple).

    Raises:
        ConfigError: The name is known neither to a plugin nor to Inspect.
    """
    if isinstance(sandbox, Mapping):
        return ProviderMapping(dict(sandbox))
    if not isinstance(sandbox, str) or _known_to_inspect(sandbox):
        return None
    return ProviderMapping({"*": sandbox})


def _mapper(name: object) -> SandboxMapper:
    catalogue = default_plugins().catalogue(_HOOK)
    if not isinstance(name, str):
        raise ConfigError(f"a sandbox provider is given by name, not as {name!r}")
    if name in catalogue.clashes:
        raise ConfigError(f"sandbox provider {catalogue.clashes[name]}")
    if name in catalogue.entries:
        return catalogue.entries[name]
    if _known_to_inspect(name):
        return lambda spec: SandboxEnvironmentSpec(name, spec.config)
    registered = internals.registry_find(lambda info: info.type == "sandboxenv")
    known = {registry_info(each).name.rpartition("/")[2] for each in registered}
    known = {*catalogue.entries, *(each for each in known if not each.startswith("inspect_rl_"))}
    raise ConfigError(
        f"unknown sandbox provider {name!r}: it is neither registered with Inspect nor given by a "
        f"plugin{catalogue.broken}.{suggestion(name, sorted(known), most=len(known))}"
    )


def _known_to_inspect(name: str) -> bool:
    try:
        internals.registry_find_sandboxenv(name)
    except ValueError:
        return False
    return True
