"""Every hook is documented and tested, and the documentation's examples really run."""

from __future__ import annotations

import inspect
import re
import sys
from functools import partial
from pathlib import Path

import pytest
from tests.packages import run

from inspect_tinker_plugin.plugins import hookspecs
from inspect_tinker_plugin.plugins.manager import HOOKS, default_plugins
from inspect_tinker_plugin.rewards import resolve_group_reward, resolve_reward
from inspect_tinker_plugin.tools import resolve_tool_executor

ROOT = Path(__file__).resolve().parents[2]
HOOKS_PAGE = (ROOT / "docs" / "hooks.md").read_text()
REWARDS_PAGE = (ROOT / "docs" / "rewards.md").read_text()
EXAMPLES = ROOT / "example_plugins"

python = partial(run, sys.executable)


def blocks(page: str) -> list[tuple[str, str]]:
    """Titled code blocks of a page: title and text."""
    return re.findall(r'^```\w+ title="([^"]+)"\n(.*?)\n```$', page, re.MULTILINE | re.DOTALL)


def section(hook: str) -> str:
    _, _, rest = HOOKS_PAGE.partition(f"## `{hook}`\n")
    return rest.partition("\n## ")[0]


def expressions(page: str, heading: str) -> list[str]:
    """Return the entries in the first column of a table under a heading."""
    _, _, rest = page.partition(heading)
    rows = re.findall(r"^\| (`.*?`) \| ", rest.partition("\n## ")[0], re.MULTILINE)
    return [expression for row in rows for expression in re.findall(r"`([^`]+)`", row)]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_has_a_docstring_a_section_an_example_and_a_test(hook: str) -> None:
    spec = getattr(hookspecs, hook)
    parameters = list(inspect.signature(spec).parameters)
    assert "Returns:" in (spec.__doc__ or "")
    assert ("Args:" in spec.__doc__) == bool(parameters)
    assert section(hook), f"docs/hooks.md has no section on {hook}"
    for parameter in parameters:
        assert f"`{parameter}`" in section(hook)
    assert f"def {hook}(" in section(hook), "the section shows no example"
    tests = (ROOT / "tests" / "plugins").glob("test_*.py")
    assert any(f"def test_{hook}(" in file.read_text() for file in tests)


def test_the_documentation_shows_no_hook_that_does_not_exist() -> None:
    packages = {"inspect_rl_audit"}
    assert set(re.findall(r"\binspect_rl_\w+", HOOKS_PAGE)) - packages == set(HOOKS)


@pytest.mark.parametrize(
    ("title", "text"),
    [block for block in blocks(HOOKS_PAGE) if block[0].startswith("acme")],
    ids=lambda value: value if len(value) < 40 else "",
)
def test_what_is_shown_of_an_example_package_is_in_it(title: str, text: str) -> None:
    [source] = [path for path in EXAMPLES.rglob("*") if path.as_posix().endswith(title)]
    assert text in source.read_text()


def test_a_module_is_shown_whole_first_with_its_imports_and_runs(tmp_path: Path) -> None:
    whole = dict(reversed([block for block in blocks(HOOKS_PAGE) if block[0].endswith(".py")]))
    for title, text in whole.items():
        if not title.startswith("acme"):
            continue
        [source] = [path for path in EXAMPLES.rglob("*") if path.as_posix().endswith(title)]
        assert source.read_text() == text + "\n", f"{title} is not shown whole"
        file = tmp_path / title.removeprefix("acme-rewards/")
        file.parent.mkdir(exist_ok=True)
        file.write_text(text + "\n")
    modules = [each.relative_to(tmp_path) for each in sorted(tmp_path.rglob("*.py"))]
    names = [".".join(each.with_suffix("").parts).removesuffix(".__init__") for each in modules]
    assert len(names) == 10
    where = python(
        "-c",
        f"import {', '.join(names)}; print(acme_tools.__file__)",
        path=tmp_path,
    )
    assert where.startswith(str(tmp_path))


@pytest.mark.nightly
def test_the_tutorial_builds_a_package_from_nothing(tmp_path: Path) -> None:
    shown = dict(reversed(blocks(HOOKS_PAGE)))  # the first block of a title is the whole file
    package = tmp_path / "acme-rewards"
    package.mkdir()
    for name in ("pyproject.toml", "acme_rewards.py"):
        (package / name).write_text(shown[f"acme-rewards/{name}"] + "\n")
        assert (package / name).read_text() == (EXAMPLES / "acme-rewards" / name).read_text()
    site = tmp_path / "site"
    pip = ["-m", "pip", "install", "-qq", "--no-deps", "--no-build-isolation", "--target"]
    python(*pip, str(site), str(package))
    (tmp_path / "try_it.py").write_text(shown["try_it.py"])
    assert python("try_it.py", cwd=tmp_path, path=site) == shown["what try_it.py prints"] + "\n"
    where = python("-c", "import acme_rewards; print(acme_rewards.__file__)", path=site)
    assert where.startswith(str(site))


def test_the_function_on_the_rewards_page_is_a_reward() -> None:
    [code] = re.findall(r"^```python\n(.*?)\n```$", REWARDS_PAGE, re.MULTILINE | re.DOTALL)
    namespace: dict[str, object] = {}
    exec(code, namespace)
    resolve_reward(namespace["few_words"])  # type: ignore[arg-type]


@pytest.mark.parametrize("expression", expressions(REWARDS_PAGE, "## Expressions"))
def test_a_reward_on_the_page_resolves(expression: str) -> None:
    resolve_reward(expression)


@pytest.mark.parametrize("expression", expressions(REWARDS_PAGE, "## Group rewards"))
def test_a_group_reward_on_the_page_resolves(expression: str) -> None:
    resolve_group_reward(expression.replace("my_package.judges:better", "operator:gt"))


@pytest.mark.parametrize("expression", expressions(HOOKS_PAGE, "## `inspect_rl_tool_executors`"))
def test_a_tool_executor_on_the_page_resolves(expression: str) -> None:
    assert (resolve_tool_executor(expression) is None) == (expression == "inspect")


@pytest.mark.parametrize(
    ("hook", "page"),
    [
        ("inspect_rl_reward_aggregators", REWARDS_PAGE),
        ("inspect_rl_group_aggregators", REWARDS_PAGE),
        ("inspect_rl_tool_executors", section("inspect_rl_tool_executors")),
        ("inspect_rl_samplers", section("inspect_rl_samplers")),
    ],
)
def test_everything_built_in_is_documented(hook: str, page: str) -> None:
    for name in default_plugins().plugins[0].hooks[hook]:
        assert re.search(rf"`{name}\b", page), f"{name} is not documented"
