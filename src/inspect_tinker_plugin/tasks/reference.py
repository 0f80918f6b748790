"""References to tasks: from a user's text to a live Task, and back to a picklable reference."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inspect_tinker_plugin.contracts.errors import TaskError, TaskNotFoundError
from inspect_tinker_plugin.contracts.wording import suggestion

if TYPE_CHECKING:
    from inspect_ai import Task

TASK_SUFFIXES = (".py", ".ipynb")


@dataclass(frozen=True)
class TaskRef:
    """A task by name and arguments: small, picklable, and the same in every process.

    Make one from a user's text with :meth:`parse`.
    """

    spec: str
    """A registered name (``package/task``, ``hf/org/dataset``) or ``/absolute/file.py@task``."""

    args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the task function."""

    run_dir: str | None = None
    """Folder that the task's relative paths start from; a task of a file has its file's."""

    @property
    def file(self) -> Path | None:
        """The task's file; ``None`` for a registered name."""
        return _split(self.spec)[0]

    @classmethod
    def parse(cls, spec: str, args: Mapping[str, Any] | None = None) -> TaskRef:
        """Read a task specification as ``inspect eval`` does.

        Args:
            spec: ``package/task``, ``file.py@task``, or ``file.py`` when it has one task.
                A relative file starts from the current folder.
            args: Arguments of the task function.

        Raises:
            TaskNotFoundError: There is no such file, or no such task in it. A registered
                name is looked up by :meth:`resolve`.
        """
        path, name = _split(spec)
        if path is None:
            return cls(spec, dict(args or {}), os.getcwd())
        file = _existing_file(path, spec)
        task = _task_in_file(file, name)
        return cls(f"{file.as_posix()}@{task}", dict(args or {}), file.parent.as_posix())

    def resolve(self, roles: Mapping[str, Any] | None = None) -> Task:
        """Create the task.

        Args:
            roles: Models by role, which the task may ask for while it is made; by default those
                that are bound.

        Raises:
            TaskNotFoundError: Nothing is registered by this name, or the file is gone.
            TaskError: The task's own code failed, or it does not take these arguments.
        """
        from inspect_tinker_plugin.tasks.loading import (
            create_from_file,
            create_registered,
            with_roles,
        )

        path, name = _split(self.spec)
        with with_roles(roles):
            if path is None:
                return create_registered(self.spec, self.args, self.run_dir)
            file = _existing_file(path, self.spec)
            return create_from_file(file, _task_in_file(file, name), self.args)


@dataclass(frozen=True)
class ResolvedTask:
    """A live task with the reference that recreates it."""

    task: Task
    ref: TaskRef | None
    """``None`` for a task that cannot be named (built in place, or by a local function)."""

    named: bool = False
    """Whether the task was made from the reference, so that it cannot have been changed since."""


def resolve_task(
    task: Task | Callable[..., Task] | str | TaskRef | ResolvedTask,
    task_args: Mapping[str, Any] | None = None,
    *,
    roles: Mapping[str, Any] | None = None,
) -> ResolvedTask:
    """Turn a task, or anything that names one, into a live task.

    Args:
        task: A Task, a function that returns one, a registered name, a file
            specification or a reference; or what was resolved before, which stays as it is.
        task_args: Arguments of the task function; not for what has its arguments already.
        roles: Models by role, which the task may ask for while it is made; by default those
            that are bound.

    Raises:
        TaskNotFoundError: There is no such task; close matches are listed.
        TaskError: The task's own code failed, or the arguments do not fit.
    """
    from inspect_ai import Task

    from inspect_tinker_plugin.tasks.loading import call_task_function, with_roles

    if isinstance(task, Task | TaskRef | ResolvedTask):
        if task_args:
            raise TaskError(
                f"task_args ({', '.join(task_args)}) belong to a task function or a name; "
                f"a {type(task).__name__} has its arguments already."
            )
        if isinstance(task, ResolvedTask):
            return task
        if isinstance(task, TaskRef):
            return ResolvedTask(task.resolve(roles), task, named=True)
        return ResolvedTask(task, task_reference(task))
    if isinstance(task, str):
        ref = TaskRef.parse(task, task_args)
        live = ref.resolve(roles)
        # A bare name is known to this process only; its file is known to every one.
        lasting = "/" in ref.spec
        return ResolvedTask(live, ref if lasting else task_reference(live), named=lasting)
    if callable(task):
        with with_roles(roles):
            live = call_task_function(task, task_args or {})
        found = task_reference(live)
        return ResolvedTask(live, found, named=found is not None)
    raise TaskError(
        f"a task is a Task, a task function, a name or a TaskRef, not {type(task).__name__}."
    )


def task_reference(task: Task) -> TaskRef | None:
    """Recover the reference of a task that an ``@task`` function created.

    The task may have been changed since, or have an argument that a name cannot carry.

    Returns:
        The reference, or ``None`` for a task that cannot be named.
    """
    from inspect_ai.util import registry_info

    from inspect_tinker_plugin import inspect_internals as internals

    try:
        name, args = registry_info(task).name, dict(internals.registry_params(task))
    except ValueError:
        return None
    if "/" in name:
        return TaskRef(name, args, internals.task_run_dir(task))
    file = _source_of(task)
    if file is None or name not in _find_declared(file):
        return None
    return TaskRef(f"{file.as_posix()}@{name}", args, file.parent.as_posix())


def task_digest(task: Task) -> str:
    """Return a digest of a task's file and samples, which differs once one of them has changed."""
    digest = hashlib.sha256()
    if (file := _source_of(task)) is not None:
        digest.update(file.read_bytes())
    for sample in task.dataset:
        try:
            held = sample.model_dump_json(exclude={"id"}, fallback=str).encode()
        except ValueError:  # half a surrogate pair
            held = repr(sample.model_dump(exclude={"id"})).encode(errors="surrogatepass")
        digest.update(held)
    return digest.hexdigest()[:16]


def _source_of(task: Task) -> Path | None:
    from inspect_tinker_plugin import inspect_internals as internals

    source = internals.task_file(task)
    file = Path(source).absolute() if source else None
    return file if file is not None and file.suffix in TASK_SUFFIXES and file.is_file() else None


def _split(spec: str) -> tuple[Path | None, str | None]:
    """Split ``file@task``; the file is None for a registered name."""
    if not spec:
        raise TaskNotFoundError("a task needs a name: package/task or file.py@task.")
    before, at, after = spec.rpartition("@")
    path, name = (before, after) if at else (spec, None)
    if Path(path).suffix in TASK_SUFFIXES:
        return Path(path), name or None
    if (at and path and Path(path).exists()) or (
        path.startswith(("/", ".")) and Path(path).is_file()
    ):
        raise TaskNotFoundError(f"{path} is not a Python file or a notebook, so it has no tasks.")
    if not at and Path(path).is_dir() and not path.startswith("hf/"):
        raise TaskNotFoundError(_FOLDER.format(path))
    return None, None


_FOLDER = "{} is a folder; name one task, as file.py@task."


def _existing_file(path: Path, spec: str) -> Path:
    if path.is_file():
        return path.resolve()
    if path.is_dir():
        raise TaskNotFoundError(_FOLDER.format(path))
    folder = path.parent
    if folder.is_dir():
        others = [p.name for p in sorted(folder.iterdir()) if p.suffix in TASK_SUFFIXES]
        raise TaskNotFoundError(f"{spec}: there is no file {path}.{suggestion(path.name, others)}")
    raise TaskNotFoundError(f"{spec}: there is no folder {folder}.")


def _find_declared(file: Path) -> list[str]:
    """Names of the ``@task`` functions of a file, read without running it."""
    from inspect_tinker_plugin import inspect_internals as internals

    try:
        if file.suffix == ".py":
            compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
        return [name for name, _ in internals.parse_decorators(file, "task")]
    except UnicodeDecodeError as error:
        raise TaskError(f"{file} cannot be read as UTF-8, which Inspect needs: {error}") from error
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f"{file}, line {line}" if line else str(file)
        raise TaskError(f"{where}: {type(error).__name__}: {error.args[0]}") from error
    except OSError as error:
        raise TaskNotFoundError(f"{file} cannot be read: {error.strerror}.") from error


def _task_in_file(file: Path, name: str | None) -> str:
    names = _find_declared(file)
    if not names:
        hint = "" if file.suffix == ".py" else " (notebooks are read with nbformat and IPython)"
        raise TaskNotFoundError(f"{file} has no function decorated with @task{hint}.")
    if name is None:
        if len(names) > 1:
            options = ", ".join(f"{file.name}@{each}" for each in names)
            raise TaskNotFoundError(f"{file} has several tasks; name one of {options}.")
        return names[0]
    if name not in names:
        raise TaskNotFoundError(f"{file} has no task {name!r}.{suggestion(name, names)}")
    return name
