"""Multiple choice: four answers, one of them right, in an order that may be shuffled.

inspect eval example_tasks/science_quiz.py -T cot=true --model openai/gpt-4o-mini
"""

from __future__ import annotations

from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import json_dataset
from inspect_ai.scorer import choice
from inspect_ai.solver import multiple_choice

DATA = Path(__file__).parent / "data" / "science_quiz.jsonl"


@task
def science_quiz(cot: bool = False, shuffle_seed: int | None = None) -> Task:
    """Sixteen questions from school science.

    Args:
        cot: let the model think before it answers.
        shuffle_seed: shuffle the answers of every question with this seed.
    """
    dataset = json_dataset(str(DATA))
    if shuffle_seed is not None:
        dataset.shuffle_choices(seed=shuffle_seed)
    return Task(dataset=dataset, solver=multiple_choice(cot=cot), scorer=choice())
