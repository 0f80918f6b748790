"""Planted defects of tasks without a sandbox: scorers, targets, templates, samples, limits."""

from __future__ import annotations

import asyncio
import datetime
import difflib
import itertools
import json
import random
import re
import time
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
    exact,
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
    prompt_template,
    solver,
    system_message,
    use_tools,
    user_message,
)
from inspect_ai.tool import Tool, ToolDef, tool
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


@planted("constant-reward")
def always_half() -> Task:
    return Task(dataset=sums(), scorer=scoring(lambda said, target: 0.5))


@planted("scorer-not-repeatable")
def a_coin() -> Task:
    return Task(dataset=capitals(), scorer=scoring(lambda said, target: random.random()))


@planted("scorer-not-repeatable")
def the_tenth_of_a_second() -> Task:
    return Task(
        dataset=capitals(), scorer=scoring(lambda said, target: int(time.time() * 7) % 2 == 0)
    )


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


@planted("hedged-answer")
def a_closed_set_of_labels() -> Task:
    labels = ["positive", "negative", "neutral"]
    samples = [
        Sample(id=n, input=f"Review number {n}: what does it feel like?", target=labels[n % 3])
        for n in range(12)
    ]
    return Task(dataset=samples, scorer=scoring(lambda s, t: "ANSWER:" in s and t in s))


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


@planted("gold-below-full")
def one_sample_pays_ten_times_as_much() -> Task:
    def judge(said: str, target: str) -> float:
        return (10.0 if target == "Oslo" else 1.0) * (said.strip() == target)

    return Task(dataset=capitals(), scorer=scoring(judge))


@planted("unscored")
def infinitely_good() -> Task:
    def judge(said: str, target: str) -> float:
        return float("inf") if target in said else 0.0

    return Task(dataset=capitals(), scorer=scoring(judge))


@planted("judge-missing")
def nobody_to_ask() -> Task:
    return Task(dataset=capitals(), scorer=model_graded_qa(model_role="examiner"))


@planted("substring-match")
def digits_anywhere() -> Task:
    return Task(dataset=sums(), scorer=match(location="any"))


@planted("case-sensitive")
def only_a_capital_yes() -> Task:
    samples = [
        Sample(id=n, input=f"Is {n} even? Answer Yes or No.", target=("Yes", "No")[n % 2])
        for n in range(8)
    ]
    return Task(
        dataset=samples,
        scorer=scoring(lambda s, t: re.search(rf"(?:^|ANSWER: ){t}\s*$", s) is not None),
    )


@planted("hedged-answer")
def every_word_counts_and_none_too_many() -> Task:
    """Recall without precision: the longer the answer, the better."""

    def judge(said: str, target: str) -> float:
        wanted, found = set(target.lower().split()), set(re.findall(r"\w+", said.lower()))
        return len(wanted & found) / len(wanted)

    samples = [
        Sample(id=n, input=f"Who wrote book {n}?", target=name)
        for n, name in enumerate(["Jane Austen", "Leo Tolstoy", "Toni Morrison", "Lu Xun"])
    ]
    return Task(dataset=samples, scorer=scoring(judge))


@planted("wrong-answer-accepted")
def near_enough_is_very_far() -> Task:
    def judge(said: str, target: str) -> bool:
        numbers = re.findall(r"-?\d+", said)
        return bool(numbers) and abs(int(numbers[-1]) - int(target)) < 1000

    return Task(dataset=sums(), scorer=scoring(judge))


@planted("constant-reward")
def the_question_is_scored_too() -> Task:
    """The whole conversation is searched, and its example has the format of an answer."""

    @scorer(metrics=[accuracy()], name="conversation")
    def conversation() -> Scorer:
        async def score(state: TaskState, target: Target) -> Score:
            text = "\n".join(message.text for message in state.messages)
            good = re.search(r"ANSWER: \w+", text) is not None
            return Score(value=CORRECT if good else INCORRECT)

        return score

    return Task(
        dataset=capitals(),
        solver=[prompt_template("{prompt}\nExample: ANSWER: Berlin"), generate()],
        scorer=conversation(),
    )


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


@planted("empty-reply")
def any_of_a_list_of_which_one_is_empty() -> Task:
    samples = [Sample(id=land, input=f"The capital of {land}?", target=[town, ""])
               for land, town in CAPITALS.items()]  # fmt: skip
    return Task(dataset=samples, scorer=includes())


@planted("judge-flattery")
def a_judge_who_reads_the_last_grade() -> Task:
    """The verdict is the last grade in a text that repeats the submission at its end."""

    def judge(request: TurnRequest) -> str:
        text = request.messages[-1].text
        submission = text.split("[Submission]")[-1].split("***")[0].strip(": \n")
        target = text.split("[Criterion]")[-1].split("***")[0].strip(": \n")
        grade = "C" if submission.endswith(target) else "I"
        return f"GRADE: {grade}, because it says: {submission}"

    return Task(
        dataset=capitals(),
        scorer=model_graded_qa(model=scripted_model(judge), grade_pattern=r"(?s).*GRADE: ([CPI])"),
    )


@planted("scorer-not-repeatable")
def the_scorer_counts() -> Task:
    counter = itertools.count()
    return Task(
        dataset=capitals(),
        scorer=scoring(lambda said, target: target in said and next(counter) % 2 == 0),
    )


@planted("padding-pays")
def every_mention_counts() -> Task:
    return Task(dataset=capitals(), scorer=scoring(lambda s, target: float(s.count(target))))


@planted("padding-pays")
def length_is_thoroughness() -> Task:
    return Task(dataset=capitals(), scorer=scoring(lambda s, t: (t in s) + len(s) / 500))


@planted("empty-reply")
def the_wrong_way_round() -> Task:
    return Task(dataset=capitals(), scorer=scoring(lambda said, target: said.strip() in target))


@planted("wrong-answer-accepted")
def a_verdict_is_remembered_by_reply() -> Task:
    verdicts: dict[str, bool] = {}
    return Task(
        dataset=capitals(),
        scorer=scoring(lambda s, target: verdicts.setdefault(s, s.strip().endswith(target))),
    )


@planted("wrong-answer-accepted")
def numbers_that_look_alike() -> Task:
    def judge(said: str, target: str) -> bool:
        ratios = [difflib.SequenceMatcher(None, word, target).ratio() for word in said.split()]
        return max(ratios, default=0.0) > 0.5

    return Task(dataset=sums(), scorer=scoring(judge))


@planted("wrong-answer-accepted")
def only_the_length_is_compared() -> Task:
    return Task(
        dataset=capitals(),
        scorer=scoring(lambda said, target: len((said.split() or [""])[-1]) == len(target)),
    )


@planted("scorer-not-repeatable")
def the_wanted_word_is_used_up() -> Task:
    samples = capitals()
    for sample in samples:
        sample.metadata = {"wanted": [sample.target]}

    @scorer(metrics=[accuracy()], name="uses_up")
    def uses_up() -> Scorer:
        async def score(state: TaskState, target: Target) -> Score:
            wanted = state.metadata["wanted"]
            good = bool(wanted) and wanted.pop() in state.output.completion
            return Score(value=CORRECT if good else INCORRECT)

        return score

    return Task(dataset=samples, scorer=uses_up())


@planted("scorer-raises")
def one_target_is_no_pattern() -> Task:
    samples = capitals()
    samples[1].target = "*Rome*"
    return Task(dataset=samples, scorer=scoring(lambda s, t: re.search(t, s) is not None))


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


@planted("gold-fails")
def a_pattern_that_nothing_meets() -> Task:
    return Task(
        dataset=capitals(),
        solver=[prompt_template("{prompt}\nEnd with RESULT=<town>."), generate()],
        scorer=pattern(r"^RESULT\s?=\s?(\w+)!$"),
    )


@planted("gold-fails")
def one_target_has_a_space_too_many() -> Task:
    samples = capitals()
    samples[3].target = "Oslo  City"

    def judge(said: str, target: str) -> bool:
        return target in " ".join(said.split())

    return Task(dataset=samples, scorer=scoring(judge))


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


@planted("target-in-prompt")
def the_input_tells() -> Task:
    samples = capitals()
    samples[2].input = f"{samples[2].input} (Answer: Madrid)"
    return Task(dataset=samples, scorer=match())


@planted("target-in-prompt")
def the_template_shows_metadata() -> Task:
    samples = capitals()
    for sample in samples:
        sample.metadata = {"note": f"From the atlas, entry {sample.target}, page 7."}
    return Task(
        dataset=samples,
        solver=[prompt_template("{note}\n\n{prompt}"), generate()],
        scorer=match(),
    )


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


@planted("conflicting-targets")
def two_truths() -> Task:
    samples = capitals()
    samples.append(samples[1].model_copy(update={"id": "Italy again", "target": "Milan"}))
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


@planted("duplicate-samples")
def the_same_choices_in_another_order() -> Task:
    samples = quiz()
    first = samples[0]
    assert first.choices is not None
    turned = first.choices[::-1]
    right = first.choices["ABCD".index(str(first.target))]
    samples.append(
        Sample(id="again", input=first.input, choices=turned, target="ABCD"[turned.index(right)])
    )
    return Task(dataset=samples, solver=multiple_choice(), scorer=choice())


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


def trained_on_what_is_known() -> Task:
    return Task(dataset=capitals(), scorer=match())


for code in ("no-signal", "solved-by-all", "solved-by-none", "cut-replies", "failed-episodes"):
    planted(code, attempts=TRIED, probes=["signal"])(trained_on_what_is_known)


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


@planted("limit-too-small")
def tokens_for_a_word() -> Task:
    return Task(dataset=sums(), scorer=match(location="end"), token_limit=4)


@planted("limit-too-small")
def no_time_for_an_answer() -> Task:
    @solver
    def patient() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            await asyncio.sleep(30)
            return await generate(state)

        return solve

    return Task(
        dataset=capitals()[:2], solver=patient(), scorer=match(location="exact"), time_limit=1
    )


@planted("target-in-prompt")
def the_tool_describes_the_answer() -> Task:
    def lexicon(town: str) -> Tool:
        async def execute(country: str) -> str:
            return "unknown"

        told = f"Look a country up, for example {town}."
        return ToolDef(execute, "lexicon", told, {"country": "Its name."}).as_tool()

    @solver
    def offer() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            state = await use_tools(lexicon(state.target.text))(state, generate)
            return await generate(state)

        return solve

    return Task(dataset=capitals(), solver=offer(), scorer=match())


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


def clean_numbers() -> Task:
    return Task(
        dataset=sums(),
        solver=[prompt_template("{prompt} End with ANSWER: and the number."), generate()],
        scorer=match(location="end", numeric=True),
    )


def clean_exact() -> Task:
    return Task(dataset=capitals(), scorer=exact())


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


def clean_reading() -> Task:
    names = ["Anna", "Bert", "Cleo", "Dirk", "Edda", "Finn", "Gwen", "Hugo"]
    things = ["lamp", "book", "coat", "kite", "drum", "vase", "rope", "flute"]
    samples = [
        Sample(
            id=name,
            input=f"{name} went to the market with {names[n - 3]}. There {name} bought a {thing}. "
            f"What did {name} buy?",
            target=thing,
        )
        for n, (name, thing) in enumerate(zip(names, things, strict=True))
    ]
    return Task(dataset=samples, scorer=match(location="exact"))


def clean_second_thoughts() -> Task:
    return Task(
        dataset=capitals(),
        solver=[generate(), user_message("Are you sure? Answer again."), generate()],
        scorer=match(location="exact"),
    )


def clean_abstention() -> Task:
    def judge(said: str, target: str) -> float:
        answer = said.strip().rstrip(".").strip("*").rpartition(" ")[2].lower()
        if answer == target.lower():
            return 1.0
        return 0.0 if not said.strip() or "know" in said else -1.0

    return Task(dataset=capitals(), scorer=scoring(judge))


def clean_lists() -> Task:
    """Lists are compared as sets, and what is too much costs."""
    fruits = {
        "red": "apple, cherry",
        "yellow": "banana, lemon",
        "green": "kiwi, pear, lime",
        "blue": "plum, sloe",
        "brown": "date, fig",
    }

    def judge(said: str, target: str) -> float:
        wanted = {each.strip() for each in target.split(",")}
        given = [e.strip(" .*").lower() for e in said.strip().rpartition(":")[2].split(",")]
        return 2 * len(wanted & set(given)) / (len(wanted) + len(given))

    samples = [
        Sample(id=c, input=f"List fruits that are {c}.", target=f) for c, f in fruits.items()
    ]
    return Task(dataset=samples, scorer=scoring(judge))


CLEAN_TOO = [clean_reading, clean_second_thoughts, clean_abstention, clean_lists]
"""Tasks of kinds that no false alarm has been seen on."""

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
    clean_numbers,
    clean_exact,
    clean_choices,
    clean_choices_with_luck,
    clean_includes,
    clean_agent,
    clean_judge,
]
