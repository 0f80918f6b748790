"""`inspect rl new`: what it writes can be installed, is found, and passes its own tests."""

from __future__ import annotations

import errno
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.packages import run

from inspect_tinker_plugin.cli.main import rl

python = partial(run, sys.executable, "-W", "ignore")

# One process: what they import takes seconds.
THEIR_TESTS = """
import pytest
from inspect_tinker_plugin.cli.main import rl

assert pytest.main(["-q", "-p", "no:cacheprovider"]) == 0
print("\\f")
rl(["plugins", "--json"], standalone_mode=False)
print("\\f")
rl(["check", "big_shop_tasks/stock", "--limit", "1"], standalone_mode=False)
print("\\f")
rl(["new", "hub", "--verifiers", "big_shop_tasks/stock"], standalone_mode=False)
"""


@pytest.mark.slow
def test_the_packages_install_and_pass_their_tests(tmp_path: Path) -> None:
    folder = tmp_path / "Big-Shop"
    done = CliRunner().invoke(rl, ["new", str(folder)])
    assert done.exit_code == 0, done.output
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in written if "newname" in path.read_text().lower()]
    site, packages = tmp_path / "site-packages", sorted(folder.glob("*-*/"))
    assert [path.name for path in packages] == ["big-shop-plugin", "big-shop-tasks"]
    pip = ["-m", "pip", "install", "-qq", "--no-deps", "--no-build-isolation", "--target"]
    python(*pip, site, *packages)
    for record in site.glob("big_shop_*/RECORD"):
        record.unlink()  # as after `pip install -e`, which records no module
    passed, plugins, checked, hub = python("-c", THEIR_TESTS, cwd=folder, path=site).split("\f")
    assert "4 passed" in passed
    listed = json.loads(plugins)["plugins"]
    [plugin] = [each for each in listed if each["name"] == "big_shop_plugin"]
    assert plugin["error"] is None
    assert len(plugin["hooks"]) == 3
    assert "2 runs, 2 agree" in checked
    assert "vf-eval hub" in hub


@pytest.mark.parametrize(
    ("task", "reason"),
    [("tasks.py@mine", "installed package"), ("inspect_ai/nothing", "there is no task")],
)
def test_a_package_for_verifiers_needs_an_installed_task(
    task: str, reason: str, tmp_path: Path
) -> None:
    done = CliRunner().invoke(rl, ["new", str(tmp_path / "hub"), "--verifiers", task])
    assert done.exit_code == 1
    assert reason in done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("2fast", "cannot name"),
        ("a+b", "cannot name"),
        (" ", "cannot name"),
        ("full", "not empty"),
        ("full/mine.txt/x", "cannot write"),
    ],
)
def test_nothing_is_written_where_it_would_not_work(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    done = CliRunner().invoke(rl, ["new", str(tmp_path / name)])
    assert done.exit_code == 1
    assert reason in done.output
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "mine.txt"]


def test_what_a_full_disk_stops_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = Path.write_text, []

    def fill(path: Path, *args: Any, **kwargs: Any) -> int:
        written.append(path)
        if len(written) == 3:
            write(path, "half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", fill)
    folder = tmp_path / "shop"
    stopped = CliRunner().invoke(rl, ["new", str(folder)])
    assert stopped.exit_code == 1
    assert "No space left" in stopped.output
    assert not list(folder.iterdir())
    assert CliRunner().invoke(rl, ["new", str(folder)]).exit_code == 0
    assert {path.name for path in folder.iterdir()} == {"README.md", "shop-tasks", "shop-plugin"}
