"""``inspect rl export`` as a user meets it: options, messages and exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.commands import Command
from tests.export.test_pipeline import rows

from inspect_tinker_plugin.cli.main import rl
from inspect_tinker_plugin.cli.options import parse_args

TASKS = """
import asyncio
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.solver import chain, generate, prompt_template, solver

def samples(count):
    return [Sample(input=f"{n}?", target=str(n)) for n in range(1, count + 1)]

@task
def sums(count=3, words=("a",)):
    return Task(dataset=samples(count), metadata={"words": list(words)})

@task
def lame():
    print("a task that talks")
    return Task(dataset=samples(3), solver=[limp(), generate()])

@task
def slow():
    return Task(dataset=samples(100), solver=[limp(0.2), generate()])

@solver
def limp(pause=0.0):
    async def solve(state, generate):
        if pause:
            await asyncio.sleep(pause)
        elif state.sample_id == 2:
            raise ValueError("no leg to stand on")
        return state
    return solve

@solver
def politely(word="please"):
    return chain(prompt_template("{prompt} " + word), generate())
"""

INSPECT = str(Path(sys.executable).with_name("inspect"))
INSPECT_RL = str(Path(sys.executable).with_name("inspect-rl"))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / "syntax.py").write_text("def broken(:\n")
    (tmp_path / "config.yaml").write_text("count: 5\n")
    (tmp_path / "list.yaml").write_text("- 5\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def export(*args: str) -> Result:
    return CliRunner().invoke(rl, ["export", *args])


def test_the_result_is_told_and_how_to_read_it() -> None:
    result = export("tasks.py@sums", "--output", "out")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert result.stdout == (
        "Wrote 3 samples of sums to out: 1 parquet file.\n"
        'Read them with datasets.load_dataset("out", split="train").\n'
    )
    assert [row["prompt"][0]["content"] for row in rows(Path("out"))] == ["1?", "2?", "3?"]


def test_a_file_of_arguments_in_json_is_read_as_json() -> None:
    Path("config.json").write_text('{\n\t"rate": 1e-5,\n\t"mark": "\\ud83d\\ude00"\n}')
    assert parse_args([], "config.json") == {"rate": 1e-5, "mark": "\N{GRINNING FACE}"}


@pytest.mark.parametrize(
    ("args", "ids"),
    [
        (["-T", "count=4"], ["1", "2", "3", "4"]),
        (["--task-config", "config.yaml"], ["1", "2", "3", "4", "5"]),
        (["--task-config", "config.yaml", "-T", "count=1"], ["1"]),
        (["--limit", "2"], ["1", "2"]),
        (["--limit", "2-3"], ["2", "3"]),
        (["--sample-id", "3, 1"], ["1", "3"]),
        (["-T", "count=9", "--sample-shuffle", "7"], None),
        (["-T", "words=x,y"], ["1", "2", "3"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("-") else "",
)
def test_options_follow_inspect_eval(args: list[str], ids: list[str] | None) -> None:
    result = export("tasks.py@sums", "--output", "out", *args)
    assert result.exit_code == 0, result.output
    found = [row["id"] for row in rows(Path("out"))]
    if ids is None:
        assert found != sorted(found)
        assert json.loads(Path("out/export.json").read_text())["seed"] == 7
    else:
        assert found == ids


def test_another_solver_makes_other_prompts() -> None:
    solver = ["--solver", "tasks.py@politely", "-S", "word=now"]
    assert export("tasks.py@sums", "-o", "out", "--limit", "1", *solver).exit_code == 0
    assert rows(Path("out"))[0]["prompt"][0]["content"] == "1? now"


def test_a_solver_that_never_asks_the_model_is_one_line() -> None:
    result = export("tasks.py@sums", "-o", "out", "--solver", "tasks.py@limp", "--limit", "1")
    assert result.exit_code == 1
    assert "without asking the model" in result.stderr


def test_a_sample_that_fails_is_named_and_the_exit_code_says_so() -> None:
    result = export("tasks.py@lame", "--output", "out")
    assert result.exit_code == 3
    assert result.stderr.endswith("sample 2: [solver] ValueError: no leg to stand on\n")
    assert "Wrote 2 samples of lame to out: 1 parquet file; 1 could not be exported.\n" in (
        result.stdout
    )
    assert [row["id"] for row in rows(Path("out"))] == ["1", "3"]


def test_the_result_can_be_had_for_other_programs() -> None:
    result = export("tasks.py@lame", "--output", "out", "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout) == {
        "path": "out",
        "files": ["train-00000-of-00001.parquet"],
        "written": 2,
        "failures": [{"id": "2", "reason": "[solver] ValueError: no leg to stand on"}],
        "continued": 0,
    }
    made = json.loads(Path("out/export.json").read_text())
    assert made["counts"] == {"samples": 3, "written": 2, "failed": 1}
    assert made["failures"] == json.loads(result.stdout)["failures"]
    assert set(made["packages"]) >= {"inspect-tinker-plugin", "inspect-ai", "datasets"}


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["nowhere.py@sums"], 1, "there is no file nowhere.py"),
        (["tasks.py@sum"], 1, "has no task 'sum'. Did you mean sums?"),
        (["nothing/registered"], 1, "Is the package 'nothing' installed?"),
        (["syntax.py"], 1, "syntax.py, line 1: SyntaxError"),
        (["tasks.py@sums", "-T", "size=3"], 1, "has no argument 'size'"),
        (["tasks.py@sums", "-T", "count=x"], 1, "could not be created: TypeError"),
        (["tasks.py@sums", "-T", "count=0"], 1, "The specified dataset is empty"),
        (["tasks.py@sums", "-T", "count"], 2, "'count' is not of the form key=value"),
        (["tasks.py@sums", "-T", "count=["], 2, "the value of count is not YAML"),
        (["tasks.py@sums", "--task-config", "no.yaml"], 2, "no.yaml cannot be read"),
        (["tasks.py@sums", "--task-config", "list.yaml"], 2, "does not hold keys with values"),
        (["tasks.py@sums", "--limit", "ten"], 2, "expected a number or a range"),
        (["tasks.py@sums", "--limit", "0"], 2, "leaves no sample"),
        (["tasks.py@sums", "--limit", "7-9"], 1, "limit 7-9 leaves no sample"),
        (["tasks.py@sums", "--sample-id", "9"], 1, "no sample has the id 9"),
        (["tasks.py@sums", "--sample-id", "1", "--limit", "1"], 1, "exclude each other"),
        (["tasks.py@sums", "--sample-shuffle", "x"], 2, "expected a seed"),
        (["tasks.py@sums", "--solver", "nobody"], 1, "solver 'nobody' could not be created"),
        (["tasks.py@sums", "-S", "a=1"], 2, "-S needs --solver"),
        (["tasks.py@sums", "--format", "csv"], 2, "'csv' is not one of"),
        (["tasks.py@sums", "--layout", "harbor"], 2, "scored by a script in the container"),
        (["tasks.py@sums", "--max-samples", "0"], 2, "--max-samples"),
        (["tasks.py@sums", "--sandbox", "nothing"], 1, "nothing"),
        (["tasks.py@sums", "--model-role", "grader=no/model"], 1, "no/model"),
        ([], 2, "Missing argument 'TASK | LOGS...'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_leaves_nothing(args: list[str], code: int, says: str) -> None:
    result = export(*args, "--output", "out")
    assert result.exit_code == code
    assert result.stdout == ""
    message = result.stderr[result.stderr.index("Error: ") :]
    assert says in message
    assert message.count("\n") == 1
    if code == 1:
        assert message == result.stderr
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("tasks.py", "tasks.py is a file; an export needs a folder.\n"),
        ("tasks.py/out", "cannot write to tasks.py/out: Not a directory.\n"),
        ("/proc/out", "cannot write to /proc/out: "),
        ("x" * 300, "File name too long: xxx"),
    ],
)
def test_an_output_that_cannot_be_written_is_one_line(output: str, says: str) -> None:
    result = export("tasks.py@sums", "--output", output)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {says}")


def test_a_traceback_is_shown_on_request() -> None:
    result = export("tasks.py@sums", "--output", "tasks.py", "--traceback")
    assert type(result.exception).__name__ == "ExportError"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        pytest.param([INSPECT, "rl"], id="inspect"),
        pytest.param([INSPECT_RL], id="inspect-rl", marks=pytest.mark.nightly),
    ],
)
def test_options_come_from_dotenv_in_every_way_to_call_it(command: list[str], folder: Path) -> None:
    (folder / ".env").write_text("INSPECT_RL_EXPORT_LIMIT=2\nINSPECT_RL_EXPORT_OUTPUT=from_env\n")
    done = subprocess.run([*command, "export", "tasks.py@sums"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(rows(folder / "from_env")) == 2


@pytest.mark.forks
def test_ctrl_c_says_how_to_continue(folder: Path) -> None:
    journal = folder / "out" / ".inspect-rl-export" / "journal.jsonl"
    command = Command("export", "tasks.py@slow", "-o", "out", "--max-samples", "2", cwd=folder)
    command.wait_until(journal.exists)
    command.send(signal.SIGINT)
    done = command.wait(60)
    assert done.returncode == 130
    assert done.stderr == "Interrupted; run the same command again to continue.\n"
    assert journal.exists()
    assert not Path("out/export.json").exists()


UNSUPPORTED = """
import inspect_ai.model._model as model
del model.init_sample_model_data
from inspect_tinker_plugin.cli.main import main
main()
"""


@pytest.mark.slow
def test_an_unsupported_inspect_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNSUPPORTED, "export", "tasks.py@sums", "-o", "out"],
        capture_output=True,
        text=True,
        env=dict(os.environ),
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Error: inspect-ai ")
    assert done.stderr.count("\n") == 1
