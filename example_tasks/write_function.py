"""Coding: complete a function; the score is whether it gives the right values in the sandbox.

    inspect eval example_tasks/write_function.py --model openai/gpt-4o-mini
    inspect eval example_tasks/write_function.py -T agent=codex_cli --model ...

With an agent, the functions are written by Claude Code, Codex or mini-swe-agent as it is shipped;
docs/agents.md tells how such programs become policies.

What the model wrote runs in a container if Docker is here with the image (`docker pull
python:3.12-slim`). Otherwise it runs on your own machine with your own rights, where the right
values lie in a file: that is for scripts, and not for a model that you train.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

from inspect_ai import Task, task
from inspect_ai.agent import Agent, as_solver
from inspect_ai.dataset import json_dataset
from inspect_ai.scorer import CORRECT, INCORRECT, Score, Scorer, Target, accuracy, scorer, stderr
from inspect_ai.solver import Solver, TaskState, generate, prompt_template
from inspect_ai.util import OutputLimitExceededError, sandbox

DATA = Path(__file__).parent / "data" / "write_function.jsonl"
PROGRAMS = Path(__file__).parent / "programs"
FILE = "solution.py"
TIMEOUT = 20  # seconds for all calls of one function
LONGEST = 100_000  # characters of what the calls give

TEMPLATE = """
Complete this Python function. Reply with one Python code block that holds the whole function
and the imports that it needs.

{prompt}
""".strip()

AGENT_TEMPLATE = """
Complete this Python function in the file {file} of the current folder, with the imports that
it needs. Try it out before you finish.

{{prompt}}
""".strip().format(file=FILE)

# Agents by their names in inspect_swe, without what would leave the sandbox or ask for side
# conversations; docs/agents.md says why each is off.
AGENTS: dict[str, dict[str, Any]] = {
    "claude_code": {"disallowed_tools": ["WebSearch", "WebFetch"]},
    "codex_cli": {"web_search": "disabled", "goals": False},
    "mini_swe_agent": {
        "env": {
            "MSWEA_MODEL_NAME": "openai/inspect",  # its client must know the API, not the model
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
    },
}

# Only calls go into the sandbox and only values come out, to be compared outside: the model's
# code may end the process, change what `assert` or `==` mean or print what it likes, and has
# nothing to say about the score. The right values are not there for it to find.
RUNNER = """
import json, os, sys

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the code prints is not an answer
calls, found = json.loads(sys.argv[1]), []
namespace = {"__name__": "solution"}
exec(compile(open("solution.py").read(), "solution.py", "exec"), namespace)
for call in calls:
    try:
        found.append(repr(eval(call, namespace)))
    except Exception as error:
        found.append("raises " + type(error).__name__)
json.dump(found, answers)
answers.flush()
"""


@task
def write_function(sandbox: str | None = None, agent: str | None = None) -> Task:
    """Eight small Python functions.

    Args:
        sandbox: "local", "docker" (which uses the compose.yaml beside this file) or
            "docker_pool"; "docker" if it can be had, else "local".
        agent: "claude_code", "codex_cli" or "mini_swe_agent" (extra `agents`): it writes the
            function into a file. Containers have it by programs/agents.Dockerfile; with "local"
            it has to be on the PATH.
    """
    sandbox = sandbox or own_sandbox()
    image = "compose.yaml" if agent is None else str(PROGRAMS / "agents.Dockerfile")
    return Task(
        dataset=json_dataset(str(DATA)),
        solver=[prompt_template(TEMPLATE), generate()] if agent is None else by_agent(agent),
        scorer=gives_right_values(file=None if agent is None else FILE),
        sandbox=sandbox if sandbox == "local" else (sandbox, image),
    )


def own_sandbox() -> str:
    """A container if an engine has the image of compose.yaml, else this machine, with a warning."""
    image = os.environ.get("EXAMPLE_TASKS_IMAGE", "python:3.12-slim")
    try:
        found = subprocess.run(
            ["docker", "image", "inspect", image], capture_output=True, timeout=60
        )
        if found.returncode == 0:
            return "docker"
        cure = f"`docker pull {image}`"
    except (OSError, subprocess.TimeoutExpired):
        cure = "Docker"
    print(
        f"{Path(__file__).name}: the model's commands will run on this machine, where they can "
        f"read the answers and all your files; {cure} gives them a container.",
        file=sys.stderr,
    )
    return "local"


def by_agent(name: str) -> list[Solver]:
    """An agent of inspect_swe that was installed in the sandbox before."""
    if name not in AGENTS:
        raise ValueError(f"agent={name}: choose one of {', '.join(AGENTS)}")
    try:
        import inspect_swe
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"agent={name} needs inspect_swe: pip install 'inspect-tinker-plugin[agents]'"
        ) from error

    agent: Agent = getattr(inspect_swe, name)(version="sandbox", **AGENTS[name])
    return [prompt_template(AGENT_TEMPLATE), as_solver(agent)]


@scorer(metrics=[accuracy(), stderr()])
def gives_right_values(file: str | None = None) -> Scorer:
    """Correct when each of the sample's calls gives its target, a Python literal.

    Args:
        file: where the code is; in the last reply by default.
    """

    async def score(state: TaskState, target: Target) -> Score:
        code = await written(file) if file else find_code(state.output.completion)
        calls: list[str] = state.metadata["calls"]
        problem = await first_problem(code, calls, list(target))
        return Score(
            value=INCORRECT if problem else CORRECT,
            answer=code,
            explanation=problem or "All calls give the right values.",
        )

    return score


async def written(file: str) -> str:
    """The code that an agent left in a file; none when it left no file."""
    try:
        return await sandbox().read_file(file)
    except (FileNotFoundError, IsADirectoryError, UnicodeDecodeError, OutputLimitExceededError):
        return ""


async def first_problem(code: str, calls: list[str], expected: list[str]) -> str | None:
    """What is wrong with the code; None when nothing is."""
    folder = uuid4().hex  # where an agent can have left nothing
    await sandbox().write_file(f"{folder}/solution.py", code.encode(errors="replace"))
    await sandbox().write_file(f"{folder}/runner.py", RUNNER)
    command = ["python3", "runner.py", json.dumps(calls)]
    try:
        result = await sandbox().exec(command, cwd=folder, timeout=TIMEOUT)
    except TimeoutError:
        return f"Ran for over {TIMEOUT} s."
    except (OutputLimitExceededError, UnicodeDecodeError):
        return "Printed too much, or no text."
    found = read_answers(result.stdout)
    if found is None or len(found) != len(calls):
        last = "\n".join(result.stderr.strip().splitlines()[-3:])
        return last or "The code ended before its function was called."
    for call, answer, right in zip(calls, found, expected, strict=True):
        if not same_value(answer, right):
            return f"{call}: expected {right}, got {answer:.200}"
    return None


def read_answers(text: str) -> list[str] | None:
    """The runner's answers; None when there is anything else."""
    try:
        answers: Any = json.loads(text) if len(text) <= LONGEST else None
    except (ValueError, RecursionError):
        return None
    listed = isinstance(answers, list) and all(isinstance(each, str) for each in answers)
    return answers if listed else None


def same_value(answer: str, right: str) -> bool:
    """Compare what two literals stand for; nothing of the answer is run."""
    if answer == right:
        return True
    try:
        return bool(ast.literal_eval(answer) == ast.literal_eval(right))
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return False


def find_code(completion: str) -> str:
    """The first Python block of a reply, or the whole reply when it has none."""
    block = re.search(r"```(?:python)?\s*\n(.*?)```", completion, re.DOTALL)
    return block.group(1) if block else completion
