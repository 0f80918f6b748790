"""Planted defects of tasks without a sandbox: scorers, targets, templates, samples, limits."""

from __future__ import annotations

import asyncio
import datetime
import itertools
import json
import random
import re
from collections.abc import Callable, MutableSequence
from typing import Any

from inspect_ai import Epochs, Task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser
from inspect_ai.scorer import (
    CORRECT,
    INCORRECT,
    Score,
    Scorer,
    Target,
    accuracy,
    choice,
    f1,
    includes,
    match,
    mean,
    model_graded_qa,
    pattern,
    scorer,
)
from inspect_ai.solver import (
    Generate,
    Solver,
    TaskState,
    generate,
    multiple_choice,
    solver,
    system_message,
    use_tools,
)
from inspect_ai.tool import Tool, tool
from tests.inspect_rl_audit.corpus import planted

from inspect_rl_audit.attempts import ModelAttempt
from inspect_tinker_plugin.contracts.episodes import TurnRequest
from inspect_tinker_plugin.testing import scripted_model

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Norway": "Oslo",
    "Austria": "Vienna",
    "Portugal": "Lisbon",
    "Greece": "Athens",
    "Poland": "Warsaw",
}


def capitals() -> list[Sample]:
    return [
        Sample(id=land, input=f"What is the capital of {land}?", target=town)
        for land, town in CAPITALS.items()
    ]


def sums(count: int = 8) -> list[Sample]:
    return [
        Sample(id=n, input=f"How much is {37 * n} plus {23 * n + 100}?", target=str(60 * n + 100))
        for n in range(1, count + 1)
    ]


def quiz() -> list[Sample]:
    towns = list(CAPITALS.values())
    return [
        Sample(
            id=land,
            input=f"What is the capital of {land}?",
            choices=towns[n % 4 : n % 4 + 4] if town in towns[n % 4 : n % 4 + 4] else
            [*towns[:3], town],
            target="ABCD"[
                (towns[n % 4 : n % 4 + 4] if town in towns[n % 4 : n % 4 + 4] else
                 [*towns[:3], town]).index(town)
            ],
        )
        for n, (land, town) in enumerate(CAPITALS.items())
    ]  # fmt: skip


def scoring(judge: Callable[[str, str], object]) -> Scorer:
    """A scorer made of a plain function of completion and target."""

    @scorer(metrics=[mean()], name="planted")
    def planted_scorer() -> Scorer:
        async def score(state: TaskState, target: Target) -> Score:
            value = judge(state.output.completion, target.text)
            if isinstance(value, bool):
                value = CORRECT if value else INCORRECT
            return Score(value=value)  # type: ignore[arg-type]

        return score

    return planted_scorer()


# scorers


@planted("empty-reply")
def no_target_and_includes() -> Task:
    samples = [*capitals(), Sample(id="hole", input="What is the capital of Atlantis?", target="")]
    return Task(dataset=samples, scorer=includes())


@planted("empty-target")
def one_target_is_missing() -> Task:
    samples = [*capitals(), Sample(id="hole", input="What is the capital of Atlantis?", target="")]
    return Task(dataset=samples, scorer=match())


@planted("constant-reward")
def always_full() -> Task:
    return Task(dataset=capitals(), scorer=scoring(lambda said, target: 1.0))


@planted("scorer-not-repeatable")
def a_coin() -> Task:
    return Task(dataset=capitals(), scorer=scoring(lambda said, target: random.random()))


@planted("time-dependent-score")
def office_hours() -> Task:
    def judge(said: str, target: str) -> bool:
        return target in said and datetime.datetime.now().hour % 2 == 0

    return Task(dataset=capitals(), scorer=scoring(judge))


@planted("reward-not-repeatable")
def a_counter_that_lives_on() -> Task:
    counter = itertools.count()

    @solver
    def count() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            state.metadata["turn"] = next(counter)
            return await generate(state)

        return solve

    @scorer(metrics=[accuracy()], name="every_third")
    def every_third() -> Scorer:
        async def score(state: TaskState, target: Target) -> Score:
            good = target.text in state.output.completion and state.metadata["turn"] % 3 == 0
            return Score(value=CORRECT if good else INCORRECT)

        return score

    return Task(dataset=capitals(), solver=count(), scorer=every_third())


@planted("inverted-reward")
def turned_around() -> Task:
    return Task(dataset=capitals(), scorer=scoring(lambda said, target: target not in said))


@planted("wrong-answer-accepted")
def any_number_will_do() -> Task:
    def judge(said: str, target: str) -> bool:
        return re.search(r"ANSWER: \d+\s*$", said) is not None

    return Task(dataset=sums(), scorer=scoring(judge))


@planted("hedged-answer")
def every_choice_is_taken() -> Task:
    return Task(
        dataset=quiz(), solver=multiple_choice(), scorer=scoring(lambda s, t: t in s.split())
    )


@planted("substring-match")
def digits_inside() -> Task:
    return Task(dataset=sums(), scorer=includes())


@planted("catch-all-answer")
def letters_anywhere() -> Task:
    samples = [
        Sample(id=n, input=f"Statement {n}: is it right, yes or no?", target=("yes", "no")[n % 2])
        for n in range(8)
    ]
    return Task(dataset=samples, scorer=includes())


@planted("garbage-answer")
def an_exception_is_a_pass() -> Task:
    def judge(said: str, target: str) -> bool:
        try:
            return bool(json.loads(said)["answer"] == target)
        except KeyError:
            return False
        except (ValueError, TypeError):
            return said.startswith("{")

    return Task(dataset=capitals(), scorer=scoring(judge))


@planted("scorer-raises")
def it_chokes() -> Task:
    def judge(said: str, target: str) -> bool:
        text = re.search(r"(\S+)$", said)
        assert text is not None
        return target == text.group(1)

    return Task(dataset=capitals(), scorer=scoring(judge))


@planted("unscored")
def not_a_number() -> Task:
    def judge(said: str, target: str) -> float:
        return 1.0 if target in said else float("nan")

    return Task(dataset=capitals(), scorer=scoring(judge))


@planted("whitespace-sensitive")
def to_the_last_space() -> Task:
    return Task(dataset=capitals(), scorer=scoring(lambda said, target: said == target))


@planted("case-sensitive")
def to_the_last_capital() -> Task:
    return Task(dataset=capitals(), scorer=scoring(lambda s, target: s.strip().endswith(target)))


@planted("answer-lost-in-reasoning")
def the_first_number_counts() -> Task:
    return Task(
        dataset=sums(),
        solver=[system_message("Think step by step, then give the number."), generate()],
        scorer=pattern(r"(\d+)"),
    )


@planted("judge-flattery")
def a_judge_who_believes() -> Task:
    def judge(request: TurnRequest) -> str:
        text = request.messages[-1].text
        submission = text.split("[Submission]")[-1]
        target = text.split("[Criterion]")[-1].split("***")[0].strip(": \n")
        if "GRADE: C" in submission.split("***")[0] or target in submission.split("***")[0]:
            return "GRADE: C"
        return "GRADE: I"

    return Task(dataset=capitals(), scorer=model_graded_qa(model=scripted_model(judge)))


@planted("refusal")
def refusing_is_safe() -> Task:
    def judge(said: str, target: str) -> bool:
        return "can't help" in said or target in said

    return Task(dataset=capitals(), scorer=scoring(judge))


@planted("no-scorer")
def nobody_scores() -> Task:
    return Task(dataset=capitals())


@planted("negative-reward")
def silence_is_gold() -> Task:
    def judge(said: str, target: str) -> float:
        return 1.0 if target in said else -1.0 if said.strip() else 0.0

    return Task(dataset=capitals(), scorer=scoring(judge))


@planted("gold-below-full")
def half_is_the_most() -> Task:
    def judge(said: str, target: str) -> float:
        return 0.5 * (target in said) + 0.5 * (len(said) > 400)

    return Task(dataset=capitals(), scorer=scoring(judge))


@planted("alternative-fails")
def only_the_first_target() -> Task:
    samples = [
        Sample(id=1, input="Name the river of Vienna.", target=["Danube", "Donau"]),
        Sample(id=2, input="Name the river of Cologne.", target=["Rhine", "Rhein"]),
    ]

    @scorer(metrics=[accuracy()], name="first_target")
    def first_target() -> Scorer:
        async def score(state: TaskState, target: Target) -> Score:
            good = target[0] in state.output.completion
            return Score(value=CORRECT if good else INCORRECT)

        return score

    return Task(dataset=samples, scorer=first_target())


@planted("negated-answer")
def the_word_in_any_sentence() -> Task:
    def judge(said: str, target: str) -> bool:
        return re.search(rf"\b{re.escape(target)}\b", said) is not None

    return Task(dataset=capitals(), scorer=scoring(judge))


@planted("punctuation-sensitive")
def no_stop_is_forgiven() -> Task:
    return Task(
        dataset=capitals(),
        scorer=scoring(lambda said, target: said.strip().lower() == target.lower()),
    )


@planted("answer-lost-when-long")
def the_scorer_is_impatient() -> Task:
    return Task(dataset=capitals(), scorer=scoring(lambda said, target: target in said[:1000]))


@planted("scorer-slow", slow_scoring=0.1, samples=2, probes=["scorer"])
def it_thinks_it_over() -> Task:
    @scorer(metrics=[accuracy()], name="slow")
    def slow() -> Scorer:
        async def score(state: TaskState, target: Target) -> Score:
            await asyncio.sleep(0.15)
            good = state.output.completion.strip() == target.text
            return Score(value=CORRECT if good else INCORRECT)

        return score

    return Task(dataset=capitals()[:2], scorer=slow())


@planted("reward-above-one")
def ten_points() -> Task:
    return Task(dataset=capitals(), scorer=scoring(lambda s, t: 10.0 if s.strip() == t else 0.0))


@planted("judge-missing")
def nobody_to_ask() -> Task:
    return Task(dataset=capitals(), scorer=model_graded_qa(model_role="examiner"))


@planted("gold-fails")
def a_target_is_taken_for_a_pattern() -> Task:
    languages = ["Ada", "Rust", "Haskell", "C (99)", "Lisp", "Zig"]
    samples = [
        Sample(id=n, input=f"Which language has number {n}?", target=name)
        for n, name in enumerate(languages)
    ]
    return Task(
        dataset=samples, scorer=scoring(lambda s, t: re.search(rf"\b{t}\s*$", s) is not None)
    )


@planted("padding-pays")
def every_mention_counts() -> Task:
    return Task(dataset=capitals(), scorer=scoring(lambda s, target: float(s.count(target))))


# templates and targets


@planted("choices-not-shown")
def the_choices_are_forgotten() -> Task:
    return Task(dataset=quiz(), solver=generate(), scorer=match())


@planted("target-in-prompt")
def the_examples_are_samples() -> Task:
    shots = "\n".join(f"Q: {shot.input} A: {shot.target}" for shot in capitals()[:3])
    return Task(
        dataset=capitals(),
        solver=[system_message(f"Examples:\n{shots}"), generate()],
        scorer=match(location="exact"),
    )


@planted("conflicting-targets")
def two_truths_in_two_spellings() -> Task:
    again = Sample(id="again", input="what is the capital of italy", target="Milan")
    return Task(dataset=[*capitals(), again], scorer=match())


@planted("target-unreachable")
def a_letter_without_a_choice() -> Task:
    samples = quiz()
    samples[5].target = "F"
    return Task(dataset=samples, solver=multiple_choice(), scorer=choice())


@planted("duplicate-choices")
def one_choice_twice() -> Task:
    samples = quiz()
    assert samples[2].choices is not None
    samples[2].choices = [*samples[2].choices[:3], samples[2].choices[0]]
    samples[2].target = "A"
    return Task(dataset=samples, solver=multiple_choice(), scorer=choice())


@planted("same-prompt")
def the_template_eats_the_question() -> Task:
    @solver
    def rewrite() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            state.messages = [ChatMessageUser(content="Name the capital of that country.")]
            return await generate(state)

        return solve

    return Task(dataset=capitals(), solver=rewrite(), scorer=match())


@planted("empty-prompt")
def nothing_is_asked() -> Task:
    samples = capitals()
    samples[4].input = " "
    return Task(dataset=samples, scorer=match())


@planted("prompt-echo")
def reading_is_copying() -> Task:
    samples = [
        Sample(id=land, input=f"{town} is the capital of {land}. Which town is?", target=town)
        for land, town in CAPITALS.items()
    ]
    return Task(dataset=samples, scorer=includes())


@planted("target-imbalance")
def the_answer_is_a() -> Task:
    samples = quiz()
    for sample in samples:
        assert sample.choices is not None
        right = sample.choices["ABCD".index(str(sample.target))]
        sample.choices = [right, *(each for each in sample.choices if each != right)]
        sample.target = "A"
    return Task(dataset=samples, solver=multiple_choice(), scorer=choice())


@planted("constant-answer")
def nearly_always_yes() -> Task:
    samples = [
        Sample(id=n, input=f"Does statement number {n} hold?", target="no" if n == 3 else "yes")
        for n in range(10)
    ]
    return Task(dataset=samples, scorer=match(location="end"))


# samples


@planted("duplicate-samples")
def copies() -> Task:
    samples = capitals()
    samples.append(samples[1].model_copy(update={"id": "Italy again"}))
    return Task(dataset=samples, scorer=match())


@planted("duplicate-id")
def one_id_for_two() -> Task:
    samples = capitals()
    samples[6].id = samples[5].id
    return Task(dataset=samples, scorer=match())


LONG = (
    "A shop sells apples at three coins, pears at four coins and plums at two coins a piece; on "
    "market day everything is one coin cheaper. {} buys ten of each on market day. How much is it?"
)


@planted("near-duplicates")
def almost_copies() -> Task:
    samples = [
        Sample(id=name, input=LONG.format(name), target=str(60))
        for name in ("Anna", "Bert", "Clara")
    ]
    return Task(dataset=[*capitals(), *samples], scorer=match())


@planted("test-overlap", test_samples=capitals()[:2])
def tested_on_what_is_trained() -> Task:
    return Task(dataset=capitals(), scorer=match())


@planted("test-near-overlap", test_samples=[Sample(id=1, input=LONG.format("Dora"), target="60")])
def tested_on_almost_the_same() -> Task:
    samples = [*capitals(), Sample(id="Anna", input=LONG.format("Anna"), target="60")]
    return Task(dataset=samples, scorer=match())


@planted("no-samples")
def a_filter_that_leaves_nothing() -> Task:
    task = Task(dataset=capitals(), scorer=match())
    task.dataset = task.dataset.filter(lambda sample: sample.target == "Atlantis")
    return task


@planted("no-gold")
def nobody_knows() -> Task:
    samples = [Sample(id=n, input=f"Write poem number {n}.") for n in range(6)]
    return Task(dataset=samples, scorer=scoring(lambda said, target: len(said.splitlines()) > 3))


@planted("epochs-reduced")
def the_best_of_five() -> Task:
    return Task(dataset=capitals(), scorer=match(), epochs=Epochs(5, "max"))


@planted("budget-spent", budget=["3"])
def more_than_there_is_time_for() -> Task:
    return Task(dataset=capitals(), scorer=match())


@planted("cost")
def something_to_pay_for() -> Task:
    return Task(dataset=capitals(), scorer=match())


def attempts(**rewards: list[float]) -> list[ModelAttempt]:
    """Attempts of a model, by sample; a reward below 0 stands for an episode that failed."""
    return [
        ModelAttempt(
            sample=sample,
            group=sample,
            reward=max(reward, 0.0),
            stop="max_tokens",
            turns=1,
            input_tokens=100,
            output_tokens=50,
            cached_tokens=0,
            trained_tokens=None,
            seconds=1.0,
            sandbox_seconds=0.0,
            failed=reward < 0,
            log="logs/none.eval",
            epoch=epoch,
        )
        for sample, given in rewards.items()
        for epoch, reward in enumerate(given, start=1)
    ]


TRIED = attempts(France=[1.0] * 4, Italy=[0.0] * 4, Spain=[0.0, 1.0, 0.0, -1.0])


@planted(
    *("no-signal", "solved-by-all", "solved-by-none", "cut-replies", "failed-episodes"),
    attempts=TRIED,
    probes=["signal"],
)
def trained_on_what_is_known() -> Task:
    return Task(dataset=capitals(), scorer=match())


@planted("prompt-too-long", prompt_tokens=500)
def a_novel() -> Task:
    samples = capitals()
    samples[0].input = "It was a dark night. " * 400 + str(samples[0].input)
    return Task(dataset=samples, scorer=match())


@planted("setup-fails")
def set_up_falls_over() -> Task:
    @solver
    def fragile() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            if state.sample_id == "Greece":
                raise FileNotFoundError("no map of Greece")
            return state

        return solve

    return Task(dataset=capitals(), setup=fragile(), scorer=match())


@planted("episode-fails")
def the_solver_falls_over() -> Task:
    @solver
    def fragile() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            state = await generate(state)
            if state.sample_id == "Greece":
                raise KeyError("answer")
            return state

        return solve

    return Task(dataset=capitals(), solver=fragile(), scorer=match())


@planted("no-model-call")
def nobody_is_asked() -> Task:
    @solver
    def silent() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            return state

        return solve

    return Task(dataset=capitals(), solver=silent(), scorer=match())


# tools and limits


@tool
def atlas() -> Tool:
    async def execute(country: str) -> str:
        """Look a country up.

        Args:
            country: Its name.
        """
        return CAPITALS.get(country, "unknown")

    return execute


@planted("tools-differ")
def one_sample_has_a_tool() -> Task:
    @solver
    def maybe() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            if state.sample_id == "Italy":
                state = await use_tools(atlas())(state, generate)
            return await generate(state)

        return solve

    return Task(dataset=capitals(), solver=maybe(), scorer=match())


@planted("limit-too-small")
def no_room_for_an_answer() -> Task:
    return Task(
        dataset=capitals(),
        solver=react(tools=[atlas()]),
        scorer=match(location="exact"),
        message_limit=3,
    )


@planted("first-tool")
def the_tool_answers() -> Task:
    @tool
    def oracle() -> Tool:
        async def execute(question: str) -> str:
            """Answer a question.

            Args:
                question: Any.
            """
            from inspect_ai.util import store

            return str(store().get("town"))

        return execute

    @solver
    def remember() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            state.store.set("town", state.target.text)
            return state

        return solve

    return Task(
        dataset=capitals(),
        setup=remember(),
        solver=react(tools=[oracle()]),
        scorer=match(location="exact"),
    )


# nothing wrong


def clean_match() -> Task:
    return Task(dataset=capitals(), scorer=match(location="exact"))


def clean_choices() -> Task:
    return Task(dataset=quiz(), solver=multiple_choice(shuffle=random.Random(7)), scorer=choice())


class OneLetter(random.Random):
    """Shuffles by luck so that the right choice is often the last one."""

    def __init__(self, right: int, last: bool) -> None:
        super().__init__()
        self._right, self._last = right, last

    def shuffle(self, x: MutableSequence[Any]) -> None:
        others = [each for each in x if each != self._right]
        x[:] = [*others, self._right] if self._last else [self._right, *others]


def clean_choices_with_luck() -> Task:
    """Five of eight right choices come last, and not those that did before the shuffle."""

    @solver(name="unlucky")
    def unlucky() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            last = state.sample_id in {"France", "Italy", "Spain", "Norway", "Greece"}
            state.choices.shuffle(OneLetter("ABCD".index(state.target.text), last))
            return state

        return solve

    return Task(dataset=quiz(), solver=[unlucky(), multiple_choice()], scorer=choice())


def clean_includes() -> Task:
    return Task(dataset=capitals(), scorer=includes())


def clean_agent() -> Task:
    return Task(
        dataset=capitals(),
        solver=react(tools=[atlas()]),
        scorer=match(location="exact"),
        message_limit=20,
    )


def clean_judge() -> Task:
    def judge(request: TurnRequest) -> str:
        text = request.messages[-1].text
        submission = text.split("[Submission]")[-1].split("***")[0].strip(": \n")
        target = text.split("[Criterion]")[-1].split("***")[0].strip(": \n")
        return "GRADE: C" if submission.endswith(target) else "GRADE: I"

    return Task(dataset=capitals(), scorer=model_graded_qa(model=scripted_model(judge)))


def clean_yes_or_no() -> Task:
    samples = [
        Sample(id=n, input=f"Is {n} even? Say yes or no.", target=("yes", "no")[n % 2])
        for n in range(10)
    ]
    return Task(dataset=samples, scorer=match(location="exact"))


def clean_overlap() -> Task:
    """Some of the words of an answer pay a part; too many words cost."""
    names = ["Jane Austen", "Leo Tolstoy", "Toni Morrison", "Lu Xun", "Ama Ata Aidoo"]
    samples = [Sample(id=n, input=f"Who wrote book {n}?", target=t) for n, t in enumerate(names)]
    return Task(dataset=samples, scorer=f1())


def clean_several_targets() -> Task:
    rivers = {"Vienna": ["Danube", "Donau"], "Cologne": ["Rhine", "Rhein"], "Rome": ["Tiber"]}
    samples = [Sample(id=t, input=f"The river of {t}?", target=r) for t, r in rivers.items()]
    return Task(dataset=samples, scorer=match(location="exact"))


def clean_ten_points() -> Task:
    def judge(said: str, target: str) -> float:
        answer = said.strip().rstrip(".").strip("*").rpartition(" ")[2]
        return 10.0 if answer.lower() == target.lower() else 0.0

    return Task(dataset=capitals(), scorer=scoring(judge))


def clean_tolerance() -> Task:
    def judge(said: str, target: str) -> bool:
        numbers = re.findall(r"-?\d+", said)
        return len(numbers) > 0 and abs(int(numbers[-1]) - int(target)) <= 1

    return Task(dataset=sums(), scorer=scoring(judge))


def clean_labels_in_turn() -> Task:
    """Samples that are tried at even distances all have the same label."""
    labels, texts = ["positive", "negative", "neutral"], ["I loved it", "Awful", "It was there"]
    samples = [
        Sample(id=n, input=f"Review {n}: {texts[n % 3]}. One of {labels}?", target=labels[n % 3])
        for n in range(12)
    ]
    return Task(dataset=samples, scorer=match(location="exact"))


def clean_numbers_of_questions() -> Task:
    """The number of one question is nearly its answer."""

    def judge(said: str, target: str) -> bool:
        numbers = re.findall(r"-?\d+(?:\.\d+)?", said)
        return bool(numbers) and abs(float(numbers[-1]) - float(target)) <= 0.01 * float(target)

    constants = [3.14, 2.718, 1.618, 0.577, 1.414, 9.81, 6.022, 8.314]
    samples = [
        Sample(id=n, input=f"What is constant number {n}?", target=str(constant))
        for n, constant in enumerate(constants)
    ]
    return Task(dataset=samples, scorer=scoring(judge))


def clean_more_noes_than_yeses() -> Task:
    samples = [
        Sample(
            id=n,
            input=f"Is {n} a prime number? Say yes or no.",
            target="yes" if n in (2, 3, 5, 7, 11) else "no",
        )
        for n in range(2, 15)
    ]
    return Task(dataset=samples, scorer=match(location="exact"))


def clean_examples() -> Task:
    shots = "Q: What is the capital of Japan? A: Tokyo\nQ: What is the capital of Peru? A: Lima"
    return Task(
        dataset=capitals(),
        solver=[system_message(shots), generate()],
        scorer=match(location="exact"),
    )


CLEAN = [
    clean_labels_in_turn,
    clean_numbers_of_questions,
    clean_more_noes_than_yeses,
    clean_examples,
    clean_yes_or_no,
    clean_overlap,
    clean_several_targets,
    clean_ten_points,
    clean_tolerance,
    clean_match,
    clean_choices,
    clean_choices_with_luck,
    clean_includes,
    clean_agent,
    clean_judge,
]
