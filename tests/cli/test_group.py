"""The group of commands: its help is cheap, complete, and the reference follows it."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import click
import pytest
from tests.packages import run

from inspect_tinker_plugin.cli.main import rl

ROOT = Path(__file__).parent.parent.parent


def test_the_reference_is_in_step() -> None:
    run(sys.executable, ROOT / "scripts" / "write_cli_reference.py", "--check")


def test_an_unknown_command_is_a_usage_error() -> None:
    with pytest.raises(click.UsageError, match=r"No such command 'exprt'. Did you mean export\?"):
        rl(["exprt"], standalone_mode=False)
    with pytest.raises(click.UsageError, match="There is audit, bench, check"):
        rl(["zzz"], standalone_mode=False)


def test_a_misspelt_option_is_met_with_a_suggestion() -> None:
    with pytest.raises(click.NoSuchOption) as caught:
        rl(["rollout", "toy.py", "--group-sise", "2"], standalone_mode=False)
    assert "--group-size" in caught.value.format_message()


@pytest.mark.parametrize("arguments", [["rescore", "logs", "-o", ""], ["train", "--log-dir="]])
def test_an_empty_value_is_refused(arguments: list[str]) -> None:
    """Of ``-o "$OUT"``, say: the folder would be the current one."""
    with pytest.raises(click.UsageError, match=r"The value of (-o|--log-dir=) is empty"):
        rl(arguments, standalone_mode=False)


TOY = f"{ROOT / 'example_tasks' / 'toy.py'}@letters"


@pytest.mark.parametrize(
    "arguments",
    [
        ["audit", TOY, "--out"],
        ["export", TOY, "--output"],
        ["new"],
        ["rescore", ".", "--output"],
        ["rollout", TOY, "--log-dir"],
        ["train", TOY, "--local", "--log-dir"],
        ["watch"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_remote_folder_is_refused_and_nothing_is_written(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path would be the folder ``s3:`` in the current one."""
    (tmp_path / "any.eval").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(click.ClickException, match="s3://bucket/x is remote; name a path of"):
        rl([*arguments, "s3://bucket/x"], standalone_mode=False)
    assert [path.name for path in tmp_path.iterdir()] == ["any.eval"]


def test_what_an_installation_without_pytorch_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "inspect_tinker_plugin.evaluate.provider", raising=False)
    monkeypatch.setitem(sys.modules, "tinker", None)
    with pytest.raises(click.ClickException, match="tinker is not installed, which this needs"):
        rl(["serve-model", "runs/mine"], standalone_mode=False)


def test_a_model_of_ours_says_so_in_an_eval_too() -> None:
    code = """
import sys
from inspect_ai.model import get_model
sys.modules["tinker"] = None
try:
    get_model("tinker/runs/mine")
except Exception as error:
    print(type(error).__name__, error.message)
"""
    printed = run(sys.executable, "-c", code)
    assert printed.startswith("PrerequisiteError tinker is not installed, which this needs: pip")


PROGRAMS = [
    [str(Path(sys.executable).with_name("inspect-rl"))],
    [str(Path(sys.executable).with_name("inspect")), "rl"],
    [sys.executable, "-m", "inspect_tinker_plugin"],
]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=["inspect-rl", "inspect rl", "python -m"])
def test_the_version_can_be_asked_for(program: list[str]) -> None:
    shown = run(*program, "--version").strip()
    assert shown == f"inspect-tinker-plugin {version('inspect-tinker-plugin')}"
