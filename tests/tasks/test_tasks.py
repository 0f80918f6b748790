"""Task names: what users may write, what it resolves to, and the errors for wrong names."""

from __future__ import annotations

import pickle
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from tests.commands import forking
from tests.packages import run

from inspect_tinker_plugin.contracts.errors import TaskError, TaskNotFoundError
from inspect_tinker_plugin.tasks.reference import TaskRef, resolve_task, task_reference

TASKS = """
from pathlib import Path
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from neighbour import ADDRESSEE

@task
def greet(name="you", times=1):
    greeting = Path("greeting.txt").read_text().strip()
    return Task(dataset=[Sample(input=f"{greeting} {name} and {ADDRESSEE}")] * times)

@task(name="renamed")
def original():
    return Task(dataset=[Sample(input="x")])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / "neighbour.py").write_text('ADDRESSEE = "all"\n')
    (tmp_path / "greeting.txt").write_text("hello\n")
    (tmp_path / "folder.py").mkdir()
    one = "from inspect_ai import Task, task\n\n@task\ndef only():\n    return Task()\n"
    (tmp_path / "one.py").write_text(one)
    (tmp_path / "none.py").write_text("x = 1\n")
    (tmp_path / "syntax.py").write_text(one + "\ndef broken(:\n")
    (tmp_path / "imports.py").write_text("import no_such_module\n" + one)
    (tmp_path / "raises.py").write_text(one.replace("Task()", "1 / 0"))
    (tmp_path / "returns.py").write_text(one.replace("Task()", "42"))
    (tmp_path / "exits.py").write_text(one + "\nimport sys\nsys.exit(0)\n")
    (tmp_path / "latin.py").write_bytes(f"# coding: latin-1\n# \u00e9\n{one}".encode("latin-1"))
    (tmp_path / "required.py").write_text(one.replace("only()", "only(size)"))
    return tmp_path


def first_input(task: Task) -> Any:
    return task.dataset[0].input


def test_a_file_task_reads_data_and_modules_beside_it_from_any_folder(folder: Path) -> None:
    resolved = resolve_task(f"{folder}/tasks.py@greet", {"name": "Ada"})
    assert first_input(resolved.task) == "hello Ada and all"
    assert resolved.ref == TaskRef(f"{folder}/tasks.py@greet", {"name": "Ada"}, str(folder))


def test_a_relative_file_starts_from_the_current_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    ref = TaskRef.parse(f"{folder.name}/tasks.py@greet")
    monkeypatch.chdir("/")
    assert first_input(ref.resolve()) == "hello you and all"


def test_the_only_task_of_a_file_needs_no_name(folder: Path) -> None:
    assert TaskRef.parse(f"{folder}/one.py").spec == f"{folder}/one.py@only"


def test_a_task_goes_by_the_name_of_its_decorator(folder: Path) -> None:
    assert resolve_task(f"{folder}/tasks.py@renamed").task.name == "renamed"


@pytest.mark.parametrize(
    ("spec", "error", "says"),
    [
        ("tasks.py", TaskNotFoundError, "several tasks; name one of tasks.py@greet, tasks.py@ren"),
        ("tasks.py@gret", TaskNotFoundError, "has no task 'gret'. Did you mean greet?"),
        ("taks.py@greet", TaskNotFoundError, "Did you mean tasks.py"),
        ("nowhere/tasks.py@greet", TaskNotFoundError, "there is no folder"),
        ("none.py", TaskNotFoundError, "no function decorated with @task"),
        ("greeting.txt@greet", TaskNotFoundError, "not a Python file"),
        (".", TaskNotFoundError, "is a folder; name one task"),
        ("folder.py", TaskNotFoundError, "folder.py is a folder; name one task"),
        ("./greeting.txt", TaskNotFoundError, "not a Python file"),
        ("@greet", TaskNotFoundError, "there is no task '@greet'."),
        ("syntax.py", TaskError, "syntax.py, line 7: SyntaxError"),
        ("imports.py", TaskError, "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raises.py", TaskError, "raises.py:5)"),
        ("returns.py", TaskError, "its function returned something else"),
        ("exits.py", TaskError, "SystemExit: 0"),
        ("latin.py", TaskError, "latin.py cannot be read as UTF-8"),
        ("", TaskNotFoundError, "a task needs a name"),
        ("required.py", TaskError, "needs the argument 'size'"),
        ("no_package/task", TaskNotFoundError, "Is the package 'no_package' installed?"),
        ("no_task", TaskNotFoundError, "there is no task 'no_task'."),
    ],
)
def test_a_wrong_name_is_one_line_that_says_what_there_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, spec: str, error: type[Exception], says: str
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(error) as caught:
        resolve_task(spec)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_argument_that_the_task_does_not_take_is_refused(folder: Path) -> None:
    with pytest.raises(TaskError, match=r"no argument 'nam'. Did you mean name\?"):
        resolve_task(f"{folder}/tasks.py@greet", {"nam": "Ada"})


def test_arguments_beside_a_live_task_are_refused() -> None:
    with pytest.raises(TaskError, match="belong to a task function or a name"):
        resolve_task(Task(dataset=[Sample(input="x")]), {"name": "Ada"})


def test_something_else_is_not_a_task() -> None:
    with pytest.raises(TaskError, match="not int"):
        resolve_task(42)  # type: ignore[arg-type]


def _inputs(ref: TaskRef) -> tuple[Any, int]:
    task = ref.resolve()
    return first_input(task), len(task.dataset)


@pytest.mark.forks
def test_a_reference_recreates_the_task_in_another_process(folder: Path) -> None:
    live = resolve_task(f"{folder}/tasks.py@greet", {"name": "Ada", "times": 3}).task
    ref = task_reference(live)
    assert ref is not None
    ref = pickle.loads(pickle.dumps(ref))
    with ProcessPoolExecutor(1, mp_context=forking()) as pool:
        assert pool.submit(_inputs, ref).result() == ("hello Ada and all", 3)


@task
def of_this_file(greeting: str = "hi", scorers: Any = None) -> Task:
    return Task(dataset=[Sample(input=greeting)])


def test_a_task_function_is_called_and_its_reference_is_recovered() -> None:
    resolved = resolve_task(of_this_file, {"greeting": "hey"})
    assert first_input(resolved.task) == "hey"
    assert resolved.ref is not None
    assert resolved.ref.spec == f"{Path(__file__).absolute()}@of_this_file"
    assert first_input(resolved.ref.resolve()) == "hey"


def test_what_no_file_can_make_again_has_no_reference() -> None:
    @task
    def local() -> Task:
        return Task(dataset=[Sample(input="x")])

    assert task_reference(local()) is None, "a function inside another"
    assert resolve_task(lambda: Task(dataset=[Sample(input="x")])).ref is None, "no decorator"
    assert task_reference(Task(dataset=[Sample(input="x")])) is None, "built in place"


PACKAGE = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample

@task
def greet(name="you"):
    return Task(dataset=[Sample(input=f"hello {name}")])
"""

PROBE = """
import pickle, sys
from inspect_tinker_plugin.contracts.errors import TaskNotFoundError
from inspect_tinker_plugin.tasks.reference import resolve_task, task_reference
resolved = resolve_task("greeter/greet", {"name": "Ada"})
again = pickle.loads(pickle.dumps(task_reference(resolved.task))).resolve()
print(resolved.ref.spec, resolved.task.name, again.dataset[0].input)
try:
    resolve_task("greeter/gret")
except TaskNotFoundError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_registered_name_is_found_through_the_package_that_registers_it(tmp_path: Path) -> None:
    tmp_path = tmp_path / "site-packages"  # Inspect's mark of an installed package
    (tmp_path / "greeter").mkdir(parents=True)
    (tmp_path / "greeter" / "__init__.py").write_text(PACKAGE)
    info = tmp_path / "greeter-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greeter\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[inspect_ai]\ngreeter = greeter\n")
    (info / "top_level.txt").write_text("greeter\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PROBE}"
    assert run(sys.executable, "-c", code).splitlines() == [
        "greeter/greet greeter/greet hello Ada",
        "there is no task 'greeter/gret'. Did you mean greeter/greet?",
    ]


def test_a_notebook_without_a_task_says_what_reads_notebooks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("IPython", "nbformat"):
        monkeypatch.setitem(sys.modules, module, None)
    notebook = tmp_path / "tasks.ipynb"
    notebook.write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    with pytest.raises(TaskNotFoundError, match="read with nbformat and IPython"):
        resolve_task(f"{notebook}@anything")
