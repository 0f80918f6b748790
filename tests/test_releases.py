"""Simulated future releases: a copy of the installed Inspect with one thing changed.

An unknown release is tried once and remembered; one that differs is refused in one line; and
`inspect` itself goes on as ever in each case.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import pytest
from inspect_ai.log import read_eval_log

from inspect_tinker_plugin.contracts.errors import VersionError
from inspect_tinker_plugin.inspect_internals import releases

pytestmark = pytest.mark.nightly

TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelAPI, ModelOutput, get_model, modelapi
from inspect_ai.scorer import includes

@modelapi("parrot")
def parrot():
    class Parrot(ModelAPI):
        async def generate(self, input, tools, tool_choice, config):
            return ModelOutput.from_content("parrot", "42")
    return Parrot

@task
def toy():
    sample = Sample(input="6 x 7?", target="42")
    return Task(dataset=[sample], scorer=includes(), model=get_model("parrot/x"))
"""
COMMAND = str(Path(sys.executable).with_name("inspect"))
ROLLOUT = ["rl", "rollout", "toy.py", "--script", "script.jsonl"]
EVAL = ["eval", "toy.py", "--display", "none", "--log-dir", "logs"]


@dataclass(frozen=True)
class Release:
    """A copy of Inspect, with a folder to work in and a separate cache."""

    folder: Path

    def edit(self, module: str, old: str, new: str) -> None:
        file = self.folder / "site" / f"{module.replace('.', '/')}.py"
        text = file.read_text(encoding="utf-8")
        assert text.count(old) >= 1, f"{module} has no {old!r} any more"
        file.unlink()  # a link to the installed one
        file.write_text(text.replace(old, new), encoding="utf-8")

    def inspect(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [COMMAND, *args],
            cwd=self.folder,
            env={
                **os.environ,
                "PYTHONPATH": str(self.folder / "site"),
                "XDG_CACHE_HOME": str(self.folder / "cache"),
                "COLUMNS": "500",
                **env,
            },
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def remembered(self) -> list[str | None]:
        file = self.folder / "cache" / "inspect-tinker-plugin" / "releases.json"
        return list(json.loads(file.read_text("utf-8")).values())


@pytest.fixture
def release(tmp_path: Path) -> Release:
    installed = distribution("inspect-ai")
    site = Path(str(installed.locate_file("")))
    new = tmp_path / "site"
    shutil.copytree(site / "inspect_ai", new / "inspect_ai", copy_function=os.link)
    info = new / "inspect_ai-0.3.9999.dist-info"
    info.mkdir()
    metadata = (installed.read_text("METADATA") or "").replace(
        f"\nVersion: {installed.version}\n", "\nVersion: 0.3.9999\n"
    )
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    (info / "entry_points.txt").write_text(installed.read_text("entry_points.txt") or "")
    (tmp_path / "toy.py").write_text(TASK)
    (tmp_path / "script.jsonl").write_text('"42"\n')
    return Release(tmp_path)


def only_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


def holds_for_inspect_itself(release: Release) -> None:
    done = release.inspect(*EVAL)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    [log] = (release.folder / "logs").glob("*.eval")
    assert read_eval_log(str(log), header_only=True).status == "success"


def test_a_release_that_behaves_as_ever_is_tried_once(release: Release) -> None:
    first = release.inspect(*ROLLOUT)
    assert first.returncode == 0, first.stderr
    assert "inspect-ai 0.3.9999 is newer than what" in first.stderr
    assert release.remembered() == [None]
    second = release.inspect(*ROLLOUT)
    assert second.returncode == 0, second.stderr
    assert "newer" not in second.stderr


def test_a_release_without_a_private_name_is_refused_in_one_line(release: Release) -> None:
    release.edit("inspect_ai._eval.task.run", "create_eval_sample", "new_eval_sample")
    line = only_line(release.inspect(*ROLLOUT))
    assert "inspect-ai 0.3.9999" in line
    assert "'create_eval_sample' from 'inspect_ai._eval.task.run'" in line
    assert only_line(release.inspect("rl", "export", "toy.py", "--output", "out")) == line
    holds_for_inspect_itself(release)


def test_a_release_that_behaves_differently_is_refused_in_one_line(release: Release) -> None:
    # evals alone, not what the runner takes from them
    release.edit("inspect_ai._eval.task.run", "Target(sample.target)", "Target('other')")
    line = only_line(release.inspect(*ROLLOUT))
    assert "inspect-ai 0.3.9999" in line
    assert "INSPECT_RL_UNCHECKED=1" in line
    assert "scores" in line
    assert release.remembered() == [line.partition("differ from evals: ")[2].partition(". Inst")[0]]
    again = release.inspect("rl", "export", "toy.py", "--output", "out")
    assert only_line(again) == line
    assert "comparing" not in again.stderr
    assert release.inspect(*ROLLOUT, INSPECT_RL_UNCHECKED="1").returncode == 0
    holds_for_inspect_itself(release)


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """This process has an untested release, and a separate cache folder."""
    monkeypatch.setattr(releases, "TRIED", {"inspect-ai": ("0.1", "0.2")})
    monkeypatch.delenv(releases.UNCHECKED, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    releases._find_difference.cache_clear()
    return tmp_path / releases.PACKAGE / "releases.json"


def says(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("code", "error", "remembered"),
    [
        ("raise AttributeError('no such field')", "AttributeError: no such field", True),
        ("import time; time.sleep(60)", "within 1 seconds", False),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            "the comparison ended with -9",
            False,
        ),
        ("raise SystemExit(2)", "the comparison ended with 2", False),
    ],
    ids=["fails", "hangs", "killed", "no room"],
)
def test_a_trial_that_does_not_end_well_is_refused_and_remembered_if_it_says_why(
    code: str, error: str, remembered: bool, unknown: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "SMOKE_TEST", says(code))
    monkeypatch.setattr(releases, "TIMEOUT", 1 if "sleep" in code else 60)
    with pytest.raises(VersionError, match=error):
        releases.require_tried()
    assert unknown.exists() == remembered


@pytest.mark.parametrize("content", ["", "[]", '{"x": {"reason": null}}'])
def test_what_another_release_remembers_does_no_harm(
    content: str, unknown: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown.parent.mkdir()
    unknown.write_text(content)
    monkeypatch.setattr(releases, "SMOKE_TEST", says(""))
    releases.require_tried()
    assert list(json.loads(unknown.read_text()).values())[-1] is None


def test_a_cache_that_cannot_be_written_costs_a_trial_and_no_more(
    unknown: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unknown.parent.write_text("a file where the folder should be")
    monkeypatch.setattr(releases, "SMOKE_TEST", says(""))
    releases.require_tried()
    assert "cannot remember" in caplog.text


def test_the_tested_releases_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "SMOKE_TEST", says("raise SystemExit(1)"))
    releases._find_difference.cache_clear()
    releases.require_tried()
