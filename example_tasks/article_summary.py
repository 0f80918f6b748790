r"""Open answers graded by another model: summarise a short article in two sentences.

The grader is the model with the role "grader". It has to be named, so that a model never
grades its own summaries:

    inspect eval example_tasks/article_summary.py --model openai/gpt-4o-mini \
        --model-role grader=anthropic/claude-sonnet-4-5
"""

from __future__ import annotations

from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import json_dataset
from inspect_ai.model import ModelRole
from inspect_ai.scorer import model_graded_qa
from inspect_ai.solver import generate, prompt_template, system_message

DATA = Path(__file__).parent / "data" / "article_summary.jsonl"


@task
def article_summary(partial_credit: bool = True) -> Task:
    """Four short articles, each with what a good summary mentions.

    Args:
        partial_credit: let the grader give half a point.
    """
    return Task(
        dataset=json_dataset(str(DATA)),
        solver=[
            system_message("You write summaries for a newspaper: plain, short and exact."),
            prompt_template("Summarise this article in at most two sentences.\n\n{prompt}"),
            generate(),
        ],
        scorer=model_graded_qa(
            partial_credit=partial_credit,
            model_role=ModelRole("grader", required=True),
        ),
    )
