"""`inspect rl check`: agreement and disagreement, in words and exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from inspect_tinker_plugin.cli.compare import check

TASKS = """
import os
import random
import time
from datetime import datetime

from inspect_ai._util.error import PrerequisiteError
from inspect_ai import Epochs, Task, task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, ContentImage
from inspect_ai.scorer import includes, model_graded_qa
from inspect_ai.solver import generate, solver, use_tools
from inspect_ai.tool import tool
from inspect_ai.util import SandboxEnvironment, sandboxenv

# modules are loaded afresh for each run; what a task leaves behind elsewhere is not
RUNS = os.environ

def samples():
    return [Sample(input=text, target=text) for text in "abcd"]

@task
def plain():
    return Task(dataset=samples(), scorer=includes())

@task
def agent():
    return Task(dataset=samples(), solver=react(), scorer=includes())

@solver
def counts():
    async def solve(state, generate):
        RUNS["PARITY_RUNS"] = RUNS.get("PARITY_RUNS", "") + "i"
        state.user_prompt.text += f" ({RUNS['PARITY_RUNS']})"
        return await generate(state)
    return solve

@task
def drifting():
    return Task(dataset=samples(), solver=counts(), scorer=includes())

@sandboxenv(name="unbuilt")
class Unbuilt(SandboxEnvironment):
    @classmethod
    async def task_init(cls, task_name, config):
        raise PrerequisiteError("no image could be built")

    async def exec(self, *args, **options): ...
    async def write_file(self, file, contents): ...
    async def read_file(self, file, text=True): ...
    @classmethod
    async def sample_cleanup(cls, *args): ...

@task
def unbuilt():
    return Task(dataset=samples(), scorer=includes(), sandbox="unbuilt")

@task
def repeated():
    return Task(dataset=samples(), scorer=includes(), epochs=Epochs(3, ["mode", "at_least_2"]))

class Odd:
    pass

@task
def odd():
    metadata = {"object": Odd(), "function": len, "half": "\\ud800", "nested": [{"at": Odd()}]}
    return Task(dataset=[Sample(input="a", target="a", metadata=metadata)], scorer=includes())

@task
def shuffled():
    return Task(dataset=random.sample(samples() * 20, 80), scorer=includes())

@solver
def raises(when):
    async def solve(state, generate):
        if when == "after":
            await generate(state)
        raise ValueError("no luck")
    return solve

@task
def failing(when="before"):
    return Task(dataset=samples(), solver=raises(when), scorer=includes())

@solver
def never_ends(how):
    async def solve(state, generate):
        while True:
            if how == "sleeps":
                await __import__("asyncio").sleep(0.01)
                continue
            try:
                state = await generate(state)
            except Exception:
                pass
    return solve

@task
def picture():
    image = ContentImage(image="data:image/png;base64,AAAA")
    return Task(dataset=[Sample(input=[ChatMessageUser(content=[image])])], solver=generate())

@task
def endless(how="asks"):
    return Task(dataset=samples(), solver=never_ends(how), scorer=includes())

@tool
def look():
    async def execute(at: str):
        '''Look.

        Args:
            at: Where.
        '''
        return at
    return execute

@solver
def noting_times():
    async def solve(state, generate):
        started = time.perf_counter()
        state.store.set("at", time.time())
        state.store.set("day", datetime.now().isoformat())
        state.store.set("asked", str(state.model))
        state = await generate(state)
        state.store.set("seconds", time.perf_counter() - started)
        return state
    return solve

@task
def timed():
    return Task(dataset=[Sample(input="a", target="a")], solver=noting_times(), scorer=includes())

@task
def graded():
    return Task(dataset=[Sample(input="a", target="a")], scorer=model_graded_qa())

@solver
def refusing():
    async def solve(state, generate):
        raise PrerequisiteError("[bold]the judge[/bold] needs a key")
    return solve

@task
def refused():
    return Task(dataset=[Sample(input="a", target="a")], solver=refusing(), scorer=includes())

@task
def looking(word="a"):
    return Task(
        dataset=[Sample(id=name, input=name, target=word) for name in ("x", "y", "z")],
        solver=[use_tools(look()), generate()],
        scorer=includes(),
    )

@solver
def shouts(loud=False):
    async def solve(state, generate):
        state.user_prompt.text = state.user_prompt.text.upper() + ("!" if loud else "")
        return await generate(state)
    return solve
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    file = tmp_path / "tasks.py"
    file.write_text(TASKS)
    return file


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(check, [str(arg) for arg in args])


@pytest.mark.parametrize(("name", "turns"), [("plain", "1 turn"), ("agent", "2 turns")])
def test_a_task_that_agrees(tasks: Path, name: str, turns: str) -> None:
    result = run(f"{tasks}@{name}", "--limit", "2")
    assert result.exit_code == 0, result.output
    assert f"sample 1, messages: agrees ({turns})" in result.output
    assert f"sample 2, tokens: agrees ({turns})" in result.output
    assert result.output.endswith("4 runs, 4 agree\n")


def test_a_task_that_drifts_is_shown_with_the_place(
    tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARITY_RUNS", "")
    result = run(f"{tasks}@drifting", "--limit", "1", "--side", "messages")
    assert result.exit_code == 1
    assert "sample 1, messages: differs" in result.output
    assert "requests[0].messages[0].content: eval 'a (i)', episode 'a (ii)'" in result.output
    assert "1 run, 0 agree" in result.output


def test_a_script_is_played(tasks: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text('"Hm."\n{"tool_calls": [{"name": "submit", "arguments": {"answer": "a"}}]}\n')
    result = run(f"{tasks}@agent", "--limit", "1", "--script", script)
    assert result.exit_code == 0, result.output
    assert "agrees (2 turns)" in result.output


def test_a_script_that_is_too_short_shows_nothing(tasks: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text('"Hm."\n')
    result = run(f"{tasks}@agent", "--limit", "1", "--script", script)
    assert result.exit_code == 1
    assert result.output.count("inconclusive") == 2
    assert "differs" not in result.output
    assert result.output.count("ran out after 1 turn") == 2


def test_a_graded_task_without_a_grader_is_one_line(tasks: Path) -> None:
    result = run(f"{tasks}@graded", "--limit", "1")
    assert result.exit_code == 1
    assert result.output.splitlines() == [
        f"sample 1, {side}: cannot be compared: the policy would be the grader; "
        "--model-role grader=PROVIDER/MODEL"
        for side in ("messages", "tokens")
    ] + ["2 runs, 0 agree"]


def test_clocks_and_the_policy_s_name_do_not_count(tasks: Path) -> None:
    result = run(f"{tasks}@timed", "--limit", "1", "--ignore", "store.second*")
    assert result.exit_code == 0, result.output
    differing = run(f"{tasks}@timed", "--limit", "1", "--side", "messages")
    assert "  store.seconds: eval " in differing.output
    assert len(differing.output.splitlines()) == 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["missing.py@plain"], "missing.py"),
        (["TASKS@nothing"], "nothing"),
        (["TASKS@plain", "--model-role", "grader=nosuch/model"], "nosuch/model"),
        (["TASKS@plain", "--cost-limit", "1"], "cost_limit needs prices"),
    ],
)
def test_bad_input_is_one_line(tasks: Path, args: list[str], message: str) -> None:
    result = run(*[arg.replace("TASKS", str(tasks)) for arg in args])
    assert result.exit_code != 0
    assert result.output.startswith("Error: ")
    assert message in result.output
    assert len(result.output.splitlines()) == 1


def reports(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("name", ["repeated", "odd", "shuffled"])
def test_what_an_eval_does_in_its_own_way_is_no_difference(tasks: Path, name: str) -> None:
    result = run(f"{tasks}@{name}", "--limit", "1")
    assert result.exit_code == 0, result.output
    assert result.output.count("agrees (1 turn)") == 2


@pytest.mark.parametrize(("when", "turns"), [("before", "0 turns"), ("after", "1 turn")])
def test_two_sides_that_fail_alike_do_not_agree(tasks: Path, when: str, turns: str) -> None:
    result = run(f"{tasks}@failing", "-T", f"when={when}", "--limit", "1")
    assert result.exit_code == 1
    for side in ("messages", "tokens"):
        assert f"sample 1, {side}: both failed: ValueError('no luck') ({turns})" in result.output
    assert result.output.endswith("2 runs, 0 agree\n")


def test_a_task_that_neither_side_can_run_has_failed(tasks: Path) -> None:
    result = run(f"{tasks}@plain", "--limit", "1", "--sandbox", "docker:missing.yaml")
    assert result.exit_code == 1
    assert "agrees" not in result.output
    assert "missing.yaml" in result.output


def test_a_sandbox_that_neither_side_can_start_is_no_difference(tasks: Path) -> None:
    result = run(f"{tasks}@unbuilt", "--limit", "1")
    assert result.exit_code == 1
    for side in ("messages", "tokens"):
        assert f"sample 1, {side}: both failed: eval PrerequisiteError: no image" in result.output


@pytest.mark.parametrize(
    ("how", "timeout", "why"),
    [
        pytest.param("asks", 600, "does not end when there is no reply", id="asks"),
        pytest.param("sleeps", 2, "did not end within 2 seconds", id="sleeps"),
    ],
)
def test_a_solver_that_does_not_end_is_ended(tasks: Path, how: str, timeout: int, why: str) -> None:
    """One asks again and again, whatever the error, when its script has run out."""
    limits = ["--limit", "1", "--side", "messages", "--timeout", str(timeout)]
    result = run(f"{tasks}@endless", "-T", f"how={how}", *limits)
    assert result.exit_code == 1
    assert "sample 1, messages: inconclusive" in result.output
    assert why in result.output


def test_what_the_renderer_cannot_carry_is_no_difference(tasks: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text('"Red."\n')
    result = run(f"{tasks}@picture", "--script", script)
    assert result.exit_code == 1
    assert "sample 1, messages: agrees" in result.output
    assert "sample 1, tokens: inconclusive" in result.output
    assert "holds an image, which the renderer cannot carry" in result.output


def test_tools_that_were_never_called_are_named(tasks: Path, tmp_path: Path) -> None:
    silent = run(f"{tasks}@looking", "--limit", "1", "--side", "messages")
    assert silent.exit_code == 0
    assert "tools never called, so not compared: look (--script FILE can call" in silent.output
    script = tmp_path / "script.jsonl"
    script.write_text('{"tool_calls": [{"name": "look", "arguments": {"at": "b"}}]}\n"a"\n')
    calling = run(f"{tasks}@looking", "--limit", "1", "--script", script)
    assert calling.exit_code == 0, calling.output
    assert "never called" not in calling.output


def test_json_has_a_line_per_run(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARITY_RUNS", "")
    result = run(f"{tasks}@drifting", "--limit", "1", "--json")
    first, second = reports(result)
    assert (first["task"], first["sample_id"], first["side"]) == ("drifting", 1, "messages")
    assert (first["verdict"], first["agrees"], first["turns"]) == ("differs", False, 1)
    assert first["differences"][0] == {
        "path": "requests[0].messages[0].content",
        "eval": "a (i)",
        "episode": "a (ii)",
    }
    assert second["side"] == "tokens"
    [failed] = reports(run(f"{tasks}@failing", "--limit", "1", "--json", "--side", "tokens"))
    assert (failed["verdict"], failed["both_failed"]) == ("both failed", "ValueError('no luck')")


def test_samples_are_chosen_as_in_other_commands(tasks: Path) -> None:
    chosen = run(f"{tasks}@looking", "--sample-id", "z,x", "--json", "--side", "messages")
    assert [each["sample_id"] for each in reports(chosen)] == ["x", "z"]
    ranged = run(f"{tasks}@looking", "--limit", "2-3", "--json", "--side", "messages")
    assert [each["sample_id"] for each in reports(ranged)] == ["y", "z"]


def test_task_arguments_and_a_solver_reach_both_sides(tasks: Path) -> None:
    result = run(
        f"{tasks}@looking", "-T", "word=q", "--limit", "1", "--json",
        "--solver", f"{tasks}@shouts", "-S", "loud=true",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert [each["turns"] for each in reports(result)] == [1, 1]
    assert all(each["uncalled_tools"] == [] for each in reports(result))
