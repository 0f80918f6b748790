"""Effects of the start-up file on an interpreter, intended and excluded ones; real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("tinker", "tinker_cookbook", "torch", "datasets", "docker", "pluggy")


def run(*args: str, python: str = sys.executable, **env: str) -> str:
    done = subprocess.run(
        [python, *args], capture_output=True, text=True, env={**os.environ, **env}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


@pytest.mark.parametrize(
    "options",
    [pytest.param([], id="", marks=pytest.mark.nightly), pytest.param(["-I"], id="isolated")],
)
def test_importing_a_part_of_inspect_adds_the_method_and_loads_nothing_heavy(
    options: list[str],
) -> None:
    code = (
        "import inspect_ai.dataset, sys\n"
        "print(sys.modules['inspect_ai'].Task.as_rl_dataset.__name__)\n"
        f"print([m for m in {HEAVY} if m in sys.modules])"
    )
    assert run(*options, "-c", code).split() == ["as_rl_dataset", "[]"]


def test_the_method_takes_what_the_function_takes() -> None:
    from inspect_tinker_plugin._startup import as_rl_dataset as method
    from inspect_tinker_plugin.rl.dataset import as_rl_dataset as function

    of_method, of_function = (dict(signature(f).parameters) for f in (method, function))
    del of_method["self"], of_function["task"], of_function["task_args"]
    assert {name: p.default for name, p in of_method.items()} == {
        name: p.default for name, p in of_function.items()
    }


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["-m", "inspect_ai"], id="module", marks=pytest.mark.nightly),
        pytest.param([str(Path(sys.executable).with_name("inspect"))], id="program"),
    ],
)
def test_rl_is_a_command_of_inspect(command: list[str]) -> None:
    assert "export" in run(*command, "rl", "--help")


def test_a_bare_interpreter_loads_nothing_of_ours() -> None:
    code = "import sys; print([m for m in sys.modules if m.startswith('inspect_')])"
    assert run("-c", code) == "[]"


def test_the_help_of_the_group_loads_plugins_and_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from inspect_tinker_plugin.cli.main import rl\n"
        "rl(['--help'], standalone_mode=False)\n"
        f"print([m for m in {HEAVY} if m in sys.modules])"
    )
    assert run("-c", code).splitlines()[-1] == "['pluggy']"


def test_modules_keep_their_own_loader() -> None:
    code = (
        "import importlib.util\n"
        "spec = importlib.util.find_spec('inspect_ai')\n"
        "print(spec.loader.get_filename('inspect_ai') == spec.origin, spec.has_location)\n"
        "import inspect_ai, inspect_ai._cli.main as main\n"
        "print({type(m.__loader__).__name__ for m in (inspect_ai, main)},\n"
        "      inspect_ai.__loader__ is inspect_ai.__spec__.loader)\n"
        "importlib.reload(inspect_ai)\n"
        "print(hasattr(inspect_ai.Task, 'as_rl_dataset'))"
    )
    assert run("-c", code).splitlines() == ["True True", "{'SourceFileLoader'} True", "True"]


def test_other_import_hooks_still_run() -> None:
    code = """
import sys
seen = []
class Other:
    def find_spec(self, name, path=None, target=None):
        if name in ("inspect_ai", "inspect_ai._cli.main"):
            seen.append(name)
for place in (0, len(sys.meta_path)):
    sys.meta_path.insert(place, Other())
import inspect_ai, inspect_ai._cli.main as main
print("inspect_ai" in seen, hasattr(inspect_ai, "Task"), "rl" in main.inspect.commands)
"""
    assert run("-c", code) == "True True True"


def test_inspect_imports_as_ever_when_the_package_is_gone(tmp_path: Path) -> None:
    (tmp_path / "inspect_tinker_plugin.py").write_text("raise RuntimeError('half uninstalled')\n")
    code = "import inspect_ai; print(hasattr(inspect_ai.Task, 'as_rl_dataset'))"
    assert run("-c", code, PYTHONPATH=str(tmp_path)) == "False"


def test_inspect_imports_with_a_warning_when_it_has_changed() -> None:
    code = """
import warnings
from types import ModuleType
from inspect_tinker_plugin import _startup
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    _startup._apply(_startup._add_command, ModuleType("inspect_ai._cli.main"))
print(len(caught), "could not extend inspect_ai._cli.main" in str(caught[0].message))
"""
    assert run("-c", code) == "1 True"


# -S skips start-up files; an editable install then needs the source folder as well
WITHOUT_START_UP = os.pathsep.join([str(ROOT / "src"), *(p for p in sys.path if "site-pack" in p)])


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("from inspect_ai import Task; print(hasattr(Task, 'as_rl_dataset'))", "False"),
        (
            "import inspect_tinker_plugin, sys; print('inspect_ai' in sys.modules)\n"
            "from inspect_ai import Task; print(hasattr(Task, 'as_rl_dataset'))",
            "False True",
        ),
        (
            "from inspect_ai import Task; import inspect_tinker_plugin\n"
            "print(hasattr(Task, 'as_rl_dataset'))",
            "True",
        ),
        pytest.param(
            "from inspect_ai import Task; import inspect_tinker_plugin._registry\n"
            "print(hasattr(Task, 'as_rl_dataset'))",
            "True",
            marks=pytest.mark.nightly,
        ),
        (
            "import inspect_tinker_plugin, inspect_ai._cli.main as main\n"
            "print('rl' in main.inspect.commands)",
            "True",
        ),
    ],
    ids=["without us", "before Inspect", "after Inspect", "entry point", "command"],
)
def test_without_start_up_files_importing_the_package_is_enough(code: str, printed: str) -> None:
    assert run("-S", "-c", code, PYTHONPATH=WITHOUT_START_UP).split() == printed.split()


@pytest.mark.parametrize("option", [["-S"], []], ids=["without start-up files", "with them"])
def test_importing_the_package_adds_a_finder_only_where_there_is_none(option: list[str]) -> None:
    code = """
import sys, importlib
def count():
    return sum(getattr(f, "__name__", "") == "InspectRLFinder" for f in sys.meta_path)
before = count()
import inspect_tinker_plugin
importlib.reload(inspect_tinker_plugin)
print(count() == max(1, before))
"""
    assert run(*option, "-c", code, PYTHONPATH=WITHOUT_START_UP) == "True"


def test_windows_is_refused_in_one_line() -> None:
    windows = "import sys; sys.platform = 'win32'\n"
    asked = "try:\n  import inspect_tinker_plugin\nexcept ImportError as e: print(e)"
    assert "Linux and macOS" in run("-S", "-c", windows + asked, PYTHONPATH=str(ROOT / "src"))
