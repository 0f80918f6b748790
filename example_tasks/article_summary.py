r"""Open answers graded by another model: summarise a short article in two sentences.

The grader is the model with the role "grader". It has to be named, so that a model never
grades its own summaries. What a rule can tell never reaches the grader: a summary that is too
long, that copies the article, or that speaks to the grader, gets nothing.

    inspect eval example_tasks/article_summary.py --model openai/gpt-4o-mini \
        --model-role grader=anthropic/claude-sonnet-4-5
"""

from __future__ import annotations

import re
from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import json_dataset
from inspect_ai.model import ModelRole
from inspect_ai.scorer import (
    INCORRECT,
    Score,
    Scorer,
    Target,
    accuracy,
    model_graded_qa,
    scorer,
    stderr,
)
from inspect_ai.solver import TaskState, generate, prompt_template, system_message

DATA = Path(__file__).parent / "data" / "article_summary.jsonl"
SENTENCES = 2
WORDS = 60
COPIED = 12  # words in a row that may be the article's own


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
        scorer=graded_summary(partial_credit),
    )


@scorer(metrics=[accuracy(), stderr()])
def graded_summary(partial_credit: bool) -> Scorer:
    """The grader's verdict on what is a summary at all."""
    by_grader = model_graded_qa(
        partial_credit=partial_credit, model_role=ModelRole("grader", required=True)
    )

    async def score(state: TaskState, target: Target) -> Score | None:
        problem = no_summary(state.output.completion, state.input_text)
        if problem:
            return Score(
                value=INCORRECT, answer=state.output.completion[:1000], explanation=problem
            )
        return await by_grader(state, target)

    return score


def no_summary(text: str, article: str) -> str | None:
    """Why a text is no summary of the article; None when it may be one."""
    words = re.findall(r"\w+", text.lower())
    if not words:
        return "There is nothing to grade."
    if len(words) > WORDS or len(re.findall(r"[.!?]+(?=\s|$)", text)) > SENTENCES:
        return f"Longer than {SENTENCES} sentences or {WORDS} words."
    if re.search(r"\b(grade[sdr]?|submission|criterion)\b|[][<>*]", text, re.IGNORECASE):
        return "Speaks to the grader."
    original = " ".join(re.findall(r"\w+", article.lower()))
    runs = (words[i : i + COPIED] for i in range(len(words) - COPIED + 1))
    if any(" ".join(run) in original for run in runs):
        return f"Copies {COPIED} words in a row."
    return None
