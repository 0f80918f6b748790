"""Single-turn maths: a word problem, one answer, compared as a number.

inspect eval example_tasks/word_problems.py --model openai/gpt-4o-mini
"""

from __future__ import annotations

from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import json_dataset
from inspect_ai.scorer import match
from inspect_ai.solver import generate, prompt_template

DATA = Path(__file__).parent / "data" / "word_problems.jsonl"

TEMPLATE = """
Solve this problem step by step. Write the result on the last line, as "ANSWER: " and a
number without its unit.

{prompt}
""".strip()


@task
def word_problems() -> Task:
    return Task(
        dataset=json_dataset(str(DATA)),
        solver=[prompt_template(TEMPLATE), generate()],
        scorer=match(location="end", numeric=True),
    )
