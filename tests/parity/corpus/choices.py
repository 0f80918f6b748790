"""Every variant of `multiple_choice`."""

from __future__ import annotations

from random import Random
from typing import Any

from inspect_ai import Task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import choice
from inspect_ai.solver import multiple_choice
from tests.parity.cases import Expect, case

from inspect_tinker_plugin.contracts.episodes import TurnRequest


def question(target: str | list[str] = "B") -> Sample:
    return Sample(
        input="Which is a fruit?", choices=["a stone", "an apple", "a cloud"], target=target
    )


def chosen(sample: Sample, **options: Any) -> Task:
    return Task(dataset=[sample], solver=multiple_choice(**options), scorer=choice())


@case(
    script=["ANSWER: B"],
    expect=Expect(turns=1, scores={"choice": "C"}, says=["B) an apple", "ANSWER: $LETTER"]),
)
def single_answer() -> Task:
    return chosen(question())


@case(script=["ANSWER: A"], expect=Expect(turns=1, scores={"choice": "I"}))
def single_answer_wrong() -> Task:
    return chosen(question())


@case(
    script=["An apple grows on trees.\nANSWER: B"],
    expect=Expect(turns=1, scores={"choice": "C"}, says=["step by step"]),
)
def single_answer_with_thought() -> Task:
    return chosen(question(), cot=True)


@case(
    script=["ANSWER: B, C"],
    expect=Expect(turns=1, scores={"choice": "C"}, says=["multiple answers may be correct"]),
)
def several_answers() -> Task:
    return chosen(question(["B", "C"]), multiple_correct=True)


@case(script=["Clouds too.\nANSWER: BC"], expect=Expect(turns=1, scores={"choice": "C"}))
def several_answers_with_thought() -> Task:
    return chosen(question(["B", "C"]), multiple_correct=True, cot=True)


@case(
    script=["ANSWER: B"],
    expect=Expect(turns=1, scores={"choice": "C"}, says=["Pick: Which is a fruit?"]),
)
def custom_choice_template() -> Task:
    template = "Pick: {question}\n{choices}\nOne of {letters}, as 'ANSWER: X'."
    return chosen(question(), template=template)


def _shuffled_letter_of_apple(request: TurnRequest) -> str:
    text = request.messages[-1].text
    line = next(line for line in text.splitlines() if line.endswith(") an apple"))
    return f"ANSWER: {line[0]}"


@case(script=[_shuffled_letter_of_apple], expect=Expect(turns=1, scores={"choice": "C"}))
def choices_shuffled_by_the_solver() -> Task:
    # The solver's own shuffle: the shown letters differ, the logged answer is put back.
    return chosen(question(), shuffle=Random(7))


@case(script=[_shuffled_letter_of_apple], expect=Expect(turns=1, scores={"choice": "C"}))
def choices_shuffled_by_the_dataset() -> Task:
    dataset = MemoryDataset([question()])
    dataset.shuffle_choices(seed=3)
    return Task(dataset=dataset, solver=multiple_choice(), scorer=choice())


@case(script=["No idea."], expect=Expect(turns=1, scores={"choice": "I"}))
def no_answer_given() -> Task:
    return chosen(question())


@case(
    script=[],
    expect=Expect(turns=0, error="ValueError"),
)
def sample_without_choices_fails() -> Task:
    return chosen(Sample(input="?", target="A"))
