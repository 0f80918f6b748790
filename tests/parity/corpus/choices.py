"""Every variant of `multiple_choice`."""

from __future__ import annotations

from random import Random

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


@case(
    script=["ANSWER: B"],
    expect=Expect(turns=1, scores={"choice": "C"}, says=["B) an apple", "ANSWER: $LETTER"]),
)
def single_answer() -> Task:
    return Task(dataset=[question()], solver=multiple_choice(), scorer=choice())


@case(script=["ANSWER: A"], expect=Expect(turns=1, scores={"choice": "I"}))
def single_answer_wrong() -> Task:
    return Task(dataset=[question()], solver=multiple_choice(), scorer=choice())


@case(
    script=["An apple grows on trees.\nANSWER: B"],
    expect=Expect(turns=1, scores={"choice": "C"}, says=["step by step"]),
)
def single_answer_with_thought() -> Task:
    return Task(dataset=[question()], solver=multiple_choice(cot=True), scorer=choice())


@case(
    script=["ANSWER: B, C"],
    expect=Expect(turns=1, scores={"choice": "C"}, says=["multiple answers may be correct"]),
)
def several_answers() -> Task:
    return Task(
        dataset=[question(["B", "C"])],
        solver=multiple_choice(multiple_correct=True),
        scorer=choice(),
    )


@case(script=["Clouds too.\nANSWER: BC"], expect=Expect(turns=1, scores={"choice": "C"}))
def several_answers_with_thought() -> Task:
    return Task(
        dataset=[question(["B", "C"])],
        solver=multiple_choice(multiple_correct=True, cot=True),
        scorer=choice(),
    )


@case(
    script=["ANSWER: B"],
    expect=Expect(turns=1, scores={"choice": "C"}, says=["Pick: Which is a fruit?"]),
)
def custom_choice_template() -> Task:
    template = "Pick: {question}\n{choices}\nOne of {letters}, as 'ANSWER: X'."
    return Task(dataset=[question()], solver=multiple_choice(template=template), scorer=choice())


def _shuffled_letter_of_apple(request: TurnRequest) -> str:
    text = request.messages[-1].text
    line = next(line for line in text.splitlines() if line.endswith(") an apple"))
    return f"ANSWER: {line[0]}"


@case(script=[_shuffled_letter_of_apple], expect=Expect(turns=1, scores={"choice": "C"}))
def choices_shuffled_by_the_solver() -> Task:
    # The solver's own shuffle: the shown letters differ, the logged answer is put back.
    return Task(
        dataset=[question()],
        solver=multiple_choice(shuffle=Random(7)),
        scorer=choice(),
    )


@case(script=[_shuffled_letter_of_apple], expect=Expect(turns=1, scores={"choice": "C"}))
def choices_shuffled_by_the_dataset() -> Task:
    dataset = MemoryDataset([question()])
    dataset.shuffle_choices(seed=3)
    return Task(dataset=dataset, solver=multiple_choice(), scorer=choice())


@case(script=["No idea."], expect=Expect(turns=1, scores={"choice": "I"}))
def no_answer_given() -> Task:
    return Task(dataset=[question()], solver=multiple_choice(), scorer=choice())


@case(
    script=[],
    expect=Expect(turns=0, error="ValueError"),
)
def sample_without_choices_fails() -> Task:
    return Task(dataset=[Sample(input="?", target="A")], solver=multiple_choice(), scorer=choice())
