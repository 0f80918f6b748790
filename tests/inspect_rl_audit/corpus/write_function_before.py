"""The coding example before it was fixed: tests run after the reply's own code."""

from __future__ import annotations

import re
from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import json_dataset
from inspect_ai.scorer import CORRECT, INCORRECT, Score, Scorer, Target, accuracy, scorer, stderr
from inspect_ai.solver import TaskState, generate, prompt_template
from inspect_ai.util import ExecResult, sandbox

DATA = Path(__file__).with_name("write_function_before.jsonl")
TIMEOUT = 20  # seconds for all tests of one function

TEMPLATE = """
Complete this Python function. Reply with one Python code block that holds the whole function
and the imports that it needs.

{prompt}
""".strip()


@task
def write_function(sandbox: str = "local") -> Task:
    """Eight small Python functions.

    Args:
        sandbox: "local" or "docker" (which uses the compose.yaml beside this file).
    """
    return Task(
        dataset=json_dataset(str(DATA)),
        solver=[prompt_template(TEMPLATE), generate()],
        scorer=tests_pass(),
        sandbox=sandbox,
    )


@scorer(metrics=[accuracy(), stderr()])
def tests_pass() -> Scorer:
    """Correct when the sample's tests pass against the reply's code."""

    async def score(state: TaskState, target: Target) -> Score:
        code = find_code(state.output.completion)
        tests: list[str] = state.metadata["tests"]
        await sandbox().write_file("check.py", "\n\n".join([code, *tests]) + "\n")
        try:
            result = await sandbox().exec(["python3", "check.py"], timeout=TIMEOUT)
        except TimeoutError:
            return Score(value=INCORRECT, answer=code, explanation=f"Ran for over {TIMEOUT} s.")
        return Score(
            value=CORRECT if result.success else INCORRECT,
            answer=code,
            explanation="All tests passed." if result.success else last_lines(result),
        )

    return score


def find_code(completion: str) -> str:
    """The first Python block of a reply, or the whole reply when it has none."""
    block = re.search(r"```(?:python)?\s*\n(.*?)```", completion, re.DOTALL)
    return block.group(1) if block else completion


def last_lines(result: ExecResult[str]) -> str:
    return "\n".join(result.stderr.strip().splitlines()[-3:])
