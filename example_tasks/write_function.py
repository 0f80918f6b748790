"""Coding: complete a function; the score is whether it gives the right values in the sandbox.

    inspect eval example_tasks/write_function.py -T sandbox=docker --model openai/gpt-4o-mini

The default sandbox, "local", runs what the model wrote on your own machine, with your own
rights, and the right values lie there in a file: choose "docker" for a model that you do not
trust, and for every model that you train.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import json_dataset
from inspect_ai.scorer import CORRECT, INCORRECT, Score, Scorer, Target, accuracy, scorer, stderr
from inspect_ai.solver import TaskState, generate, prompt_template
from inspect_ai.util import OutputLimitExceededError, sandbox

DATA = Path(__file__).parent / "data" / "write_function.jsonl"
TIMEOUT = 20  # seconds for all calls of one function
LONGEST = 100_000  # characters of what the calls give

TEMPLATE = """
Complete this Python function. Reply with one Python code block that holds the whole function
and the imports that it needs.

{prompt}
""".strip()

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
def write_function(sandbox: str = "local") -> Task:
    """Eight small Python functions.

    Args:
        sandbox: "local" or "docker" (which uses the compose.yaml beside this file).
    """
    return Task(
        dataset=json_dataset(str(DATA)),
        solver=[prompt_template(TEMPLATE), generate()],
        scorer=gives_right_values(),
        sandbox=sandbox,
    )


@scorer(metrics=[accuracy(), stderr()])
def gives_right_values() -> Scorer:
    """Correct when each of the sample's calls gives its target, a Python literal."""

    async def score(state: TaskState, target: Target) -> Score:
        code = find_code(state.output.completion)
        calls: list[str] = state.metadata["calls"]
        problem = await first_problem(code, calls, list(target))
        return Score(
            value=INCORRECT if problem else CORRECT,
            answer=code,
            explanation=problem or "All calls give the right values.",
        )

    return score


async def first_problem(code: str, calls: list[str], expected: list[str]) -> str | None:
    """What is wrong with the code; None when nothing is."""
    await sandbox().write_file("solution.py", code.encode(errors="replace"))
    await sandbox().write_file("runner.py", RUNNER)
    command = ["python3", "runner.py", json.dumps(calls)]
    try:
        result = await sandbox().exec(command, timeout=TIMEOUT)
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
