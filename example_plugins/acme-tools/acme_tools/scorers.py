"""A scorer that other packages' rewards can use."""

from __future__ import annotations

from inspect_ai.scorer import Score, Scorer, Target, mean, scorer
from inspect_ai.solver import TaskState


@scorer(metrics=[mean()])
def answer_words() -> Scorer:
    """Count the words of the answer."""

    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=len(state.output.completion.split()))

    return score
