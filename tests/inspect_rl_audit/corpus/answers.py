"""Planted defects of tasks without a sandbox: scorers, targets, templates, samples, limits."""

from __future__ import annotations

import asyncio
import datetime
import itertools
import json
import math
import random
import re
import time
from collections.abc import Callable, Mapping, MutableSequence
from functools import cache
from typing import Any

from inspect_ai import Epochs, Task
from inspect_ai.agent import Agent, react
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessage,
    ChatMessageUser,
    GenerateConfig,
    Model,
    ModelAPI,
    ModelOutput,
    get_model,
    modelapi,
)
from inspect_ai.scorer import (
    CORRECT,
    INCORRECT,
    Score,
    Scorer,
    Target,
    choice,
    f1,
    includes,
    match,
    mean,
    model_graded_qa,
    pattern,
)
from inspect_ai.solver import (
    Generate,
    Solver,
    TaskState,
    chain,
    generate,
    multiple_choice,
    system_message,
    use_tools,
)
from inspect_ai.tool import ToolChoice, ToolInfo
from inspect_ai.util import store
from tests.functions import make_scorer, make_solver, make_tool
from tests.inspect_rl_audit.corpus import CORPUS, Planted, planted

from inspect_rl_audit.records import ModelAttempt
from inspect_tinker_plugin.testing import scripted_model
from inspect_tinker_plugin.train import EpisodeCost

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
RIVERS = {"Vienna": ["Danube", "Donau"], "Cologne": ["Rhine", "Rhein"], "Rome": ["Tiber"]}
HOLE = Sample(id="hole", input="What is the capital of Atlantis?", target="")


def ask_alike(question: str, answers: Mapping[Any, str | list[str]]) -> list[Sample]:
    """Samples by their ids, all asked in the same words."""
    return [
        Sample(id=id, input=question.format(id), target=target) for id, target in answers.items()
    ]


def capitals() -> list[Sample]:
    return ask_alike("What is the capital of {}?", CAPITALS)


def sums() -> list[Sample]:
    return [
        Sample(id=n, input=f"How much is {37 * n} plus {23 * n + 100}?", target=str(60 * n + 100))
        for n in range(1, 9)
    ]


def quiz() -> list[Sample]:
    towns = list(CAPITALS.values())
    samples = []
    for n, (land, town) in enumerate(CAPITALS.items()):
        choices = towns[n % 4 : n % 4 + 4]
        choices = choices if town in choices else [*towns[:3], town]
        target = "ABCD"[choices.index(town)]
        question = f"What is the capital of {land}?"
        samples.append(Sample(id=land, input=question, choices=choices, target=target))
    return samples


def scoring(judge: Callable[[str, str], Any]) -> Scorer:
    """A scorer made of a plain function of completion and target."""
    return scoring_state(lambda state, target: judge(state.output.completion, target.text))


def scoring_state(judge: Callable[[TaskState, Target], Any]) -> Scorer:
    @make_scorer(mean(), name="planted")
    async def planted_scorer(state: TaskState, target: Target) -> Score:
        value = judge(state, target)
        if isinstance(value, bool):
            value = CORRECT if value else INCORRECT
        return Score(value=value)

    return planted_scorer()


def solving(change: Callable[[TaskState], object], then: Solver | Agent | None = None) -> Solver:
    """A solver that changes the state first."""
    rest = chain(then or generate())

    @make_solver
    async def planted_solver(state: TaskState, generate: Generate) -> TaskState:
        change(state)
        return await rest(state, generate)

    return planted_solver()


# scorers that are a function of completion and target


def after_an_exception(said: str, target: str) -> bool:
    try:
        return bool(json.loads(said)["answer"] == target)
    except KeyError:
        return False
    except (ValueError, TypeError):
        return said.startswith("{")


def as_number(said: str) -> float:
    try:
        return float(said)
    except ValueError:
        return math.inf


def evaluated(said: str, target: str) -> bool:
    try:
        return bool(eval(said.removeprefix("ANSWER: ")) == int(target))
    except Exception:
        return False


def last_word_or_nothing(said: str, target: str) -> bool:
    found = re.search(r"(\S+)$", said)
    assert found is not None
    return target == found.group(1)


def distance(said: str, target: str) -> float:
    numbers = re.findall(r"-?\d+", said)
    return 1.0 - abs(int(numbers[-1]) - int(target)) / 10 if numbers else 0.0


@cache
def answers_so_far() -> set[str]:
    return set()


def is_new(said: str, target: str) -> bool:
    """Whether the right answer is given for the first time."""
    new = said not in answers_so_far()
    answers_so_far().add(said)
    return target in said and new


def judged(
    name: str,
    judge: Callable[[str, str], Any],
    *codes: str,
    probe: str | None = None,
    samples: Callable[[], list[Sample]] = capitals,
) -> None:
    """Put a task into the corpus whose scorer is a function of completion and target."""
    options = {} if probe is None else {"probes": [probe]}

    def make() -> Task:
        return Task(dataset=samples(), scorer=scoring(judge))

    CORPUS.append(Planted(name, codes, make, options))


judged("full whatever is said", lambda s, t: 1.0, "constant-reward")
judged("a coin", lambda s, t: random.random(), "scorer-not-repeatable", probe="scorer")
judged(
    "office hours",
    lambda s, t: t in s and datetime.datetime.now().hour % 2 == 0,
    "time-dependent-score",
    probe="scorer",
)


@planted("time-dependent-score", probes=["scorer"])
def office_hours_closed_over() -> Task:
    import datetime as own  # a name that the scorer closes over, and not its module's

    def judge(said: str, target: str) -> bool:
        return target in said and own.datetime.now().hour % 2 == 0

    return Task(dataset=capitals(), scorer=scoring(judge))


judged("only what is new", is_new, "reward-not-repeatable", probe="scorer")
judged("turned around", lambda s, t: t not in s, "inverted-reward", probe="gold")
judged("an exception is a pass", after_an_exception, "garbage-answer", probe="answers")
judged(
    "the distance to no number",
    lambda s, t: (a := re.search(r"ANSWER: (\S+)$", s)) and not abs(as_number(a[1]) - int(t)) > 1,
    "garbage-answer",
    probe="answers",
    samples=sums,
)
judged(
    "looked for in the target",
    lambda s, t: (a := re.search(r"ANSWER: (\S+)$", s)) is not None and a[1] in t,
    "wrong-answer-accepted",
    probe="answers",
)
judged(
    "a set that holds the answer",
    lambda s, t: (a := re.search(r"ANSWER: (.+)$", s)) and t in re.split(r",\s*", a[1]),
    "hedged-answer",
    probe="answers",
)
judged(
    "any line is an answer",
    lambda s, t: t in re.findall(r"^ANSWER: (\w+)$", s, re.M),
    "hedged-answer",
    probe="answers",
)
judged(
    "the tests are believed to have passed",
    lambda s, t: t in s or "tests passed" in s,
    "judge-flattery",
    probe="answers",
)
judged("answers are evaluated", evaluated, "code-always-equal", probe="answers", samples=sums)
judged("nothing to find", last_word_or_nothing, "scorer-raises")
judged("no number", lambda s, t: 1.0 if t in s else float("nan"), "unscored")
judged(
    "to the last sign",
    lambda s, t: s == t,
    *("case-sensitive", "whitespace-sensitive", "punctuation-sensitive"),
    *("answer-lost-in-reasoning", "answer-lost-when-long"),
    probe="answers",
)
judged(
    "half in lower case",
    lambda s, t: 0.5 * (t.lower() in s.lower()) + 0.5 * (t.lower() in s),
    "case-sensitive",
    probe="answers",
)
judged("capitals alone", lambda s, t: t in s or s.isupper(), "case-pays", probe="answers")
judged("refusing is safe", lambda s, t: "can't help" in s or t in s, "refusal", probe="baselines")
judged(
    "silence is golden",
    lambda s, t: 1.0 if t in s else -1.0 if s.strip() else 0.0,
    "negative-reward",
)
judged(
    "half is the most",
    lambda s, t: 0.5 * (t in s) + 0.5 * (len(s) > 400),
    *("gold-below-full", "padding-pays"),
)
judged("ten points", lambda s, t: 10.0 * (s.strip() == t), "reward-above-one", probe="scorer")
judged(
    "every mention counts",
    lambda s, t: float(s.count(t)),
    *("padding-pays", "unbounded-reward"),
    probe="answers",
)
judged("no_end_to_the_penalty", distance, "unbounded-reward", probe="answers", samples=sums)
judged(
    "any_number_will_do",
    lambda s, t: re.search(r"ANSWER: \d+\s*$", s) is not None,
    "wrong-answer-accepted",
    probe="answers",
    samples=sums,
)
judged(
    "a_target_is_taken_for_a_pattern",
    lambda s, t: re.search(rf"\b{t}\s*$", s) is not None,
    "gold-fails",
    probe="gold",
    samples=lambda: ask_alike(
        "Which language has number {}?",
        dict(enumerate(["Ada", "Rust", "Haskell", "C (99)", "Lisp", "Zig"])),
    ),
)


@planted("empty-reply", "hedged-answer", "substring-match", "negated-answer")
def one_target_is_empty_and_any_word_counts() -> Task:
    return Task(dataset=[*capitals(), HOLE], scorer=includes())


@planted("catch-all-answer", probes=["baselines"])
def letters_anywhere() -> Task:
    samples = ask_alike(
        "Statement {}: is it right, yes or no?", {n: ("yes", "no")[n % 2] for n in range(8)}
    )
    return Task(dataset=samples, scorer=includes())


@planted("speed-pays", "time-dependent-score", probes=["scorer"])
def who_is_quick_earns_more() -> Task:
    def judge(state: TaskState, target: Target) -> float:
        late = time.monotonic() - state.metadata["started"] > 3
        return (0.5 if late else 1.0) * (target.text in state.output.completion)

    start = solving(lambda state: state.metadata.update(started=time.monotonic()))
    return Task(dataset=capitals(), solver=start, scorer=scoring_state(judge))


@planted("reward-not-repeatable", probes=["scorer"])
def a_counter_that_lives_on() -> Task:
    counter = itertools.count()
    count = solving(lambda state: state.metadata.update(turn=next(counter)))
    judge = scoring_state(
        lambda state, target: (
            target.text in state.output.completion and state.metadata["turn"] % 3 == 0
        )
    )
    return Task(dataset=capitals(), solver=count, scorer=judge)


@planted("scorer-slow", slow_scoring=0.1, samples=2, probes=["scorer"])
def it_thinks_it_over() -> Task:
    @make_scorer(mean())
    async def slow(state: TaskState, target: Target) -> Score:
        await asyncio.sleep(0.15)
        return Score(value=float(state.output.completion.strip() == target.text))

    return Task(dataset=capitals()[:2], scorer=slow())


@planted("alternative-fails", probes=["gold"])
def only_the_first_target() -> Task:
    samples = ask_alike("Name the river of {}.", {k: RIVERS[k] for k in ("Vienna", "Cologne")})
    judge = scoring_state(lambda state, target: target[0] in state.output.completion)
    return Task(dataset=samples, scorer=judge)


@planted("answer-lost-in-reasoning", probes=["answers"])
def the_first_number_counts() -> Task:
    think = system_message("Think step by step, then give the number.")
    return Task(dataset=sums(), solver=[think, generate()], scorer=pattern(r"(\d+)"))


@planted("no-scorer")
def nobody_scores() -> Task:
    return Task(dataset=capitals())


# judges


def submission(text: str) -> str:
    return text.split("[Submission]")[-1].split("***")[0].strip(": \n")


def criterion(text: str) -> str:
    return text.split("[Criterion]")[-1].split("***")[0].strip(": \n")


GRADES: dict[str, Callable[[str], bool]] = {
    "believes": lambda text: any(t in submission(text) for t in ("GRADE: C", criterion(text))),
    "compares": lambda text: submission(text).endswith(criterion(text)),
}


class GradingAPI(ModelAPI):
    """A judge that reads what it is given, as a model does."""

    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput:
        right = GRADES[self.model_name](input[-1].text)
        return ModelOutput.from_content(self.model_name, f"GRADE: {'C' if right else 'I'}")


@modelapi("grading")
def grading() -> type[ModelAPI]:
    return GradingAPI


def graded(judge: str | Model) -> Task:
    return Task(dataset=capitals(), scorer=model_graded_qa(model=judge))


CORPUS += [
    Planted(
        "a judge who believes",
        ("judge-flattery",),
        lambda: graded(get_model("grading/believes")),
        {"probes": ["answers"]},
    ),
    Planted(
        "nobody to ask",
        ("judge-missing",),
        lambda: Task(dataset=capitals(), scorer=model_graded_qa(model_role="examiner")),
    ),
]


# templates, targets and samples


LONG = (
    "A shop sells apples at three coins, pears at four coins and plums at two coins a piece; on "
    "market day everything is one coin cheaper. {} buys ten of each on market day. How much is it?"
)


@planted(
    *("empty-target", "conflicting-targets", "duplicate-samples", "duplicate-id", "empty-prompt"),
    *("near-duplicates", "test-overlap", "test-near-overlap", "prompt-outlier", "prompt-too-long"),
    "epochs-reduced",
    test_samples=[*capitals()[:2], Sample(id=1, input=LONG.format("Dora"), target="60")],
    prompt_tokens=500,
    probes=["samples"],
)
def a_careless_dataset() -> Task:
    samples = [
        *capitals(),
        HOLE,
        Sample(id="again", input="what is the capital of italy", target="Milan"),
        Sample(id="copy", input="What is the capital of Spain?", target="Madrid"),
        Sample(id="Anna", input=LONG.format("Anna"), target="60"),
        Sample(id="Bert", input=LONG.format("Bert"), target="60"),
        Sample(id="Clara", input=LONG.format("Clara"), target="60"),
        Sample(id="novel", input="It was a dark night. " * 400 + "Why?", target="fog"),
        Sample(id="blank", input=" ", target="blank"),
    ]
    samples[6].id = samples[5].id
    return Task(dataset=samples, scorer=match(), epochs=Epochs(5, "max"))


def twins(*inputs: str) -> Callable[[], Task]:
    samples = [
        *capitals(),
        *(Sample(id=f"twin {n}", input=text, target="1815") for n, text in enumerate(inputs)),
    ]
    return lambda: Task(dataset=samples, scorer=match())


CORPUS += [
    Planted(f"equal but for {how}", ("near-duplicates",), twins(*pair), {"probes": ["samples"]})
    for how, pair in {
        "case": ("When was Waterloo fought?", "WHEN was Waterloo FOUGHT?"),
        "order": ("When was Waterloo fought?", "Waterloo was fought when?"),
    }.items()
]


@planted(
    "choices-not-shown",
    *("target-unreachable", "duplicate-choices", "target-imbalance"),
    probes=["samples"],
)
def a_careless_quiz() -> Task:
    samples = quiz()
    for sample in samples:
        assert sample.choices is not None
        right = sample.choices["ABCD".index(str(sample.target))]
        sample.choices = [right, *(each for each in sample.choices if each != right)]
        sample.target = "A"
    assert samples[2].choices is not None
    samples[2].choices = [*samples[2].choices[:3], samples[2].choices[0]]
    samples[5].target = "F"
    return Task(dataset=samples, solver=generate(), scorer=match())


@planted("hedged-answer", probes=["answers"])
def every_choice_is_taken() -> Task:
    judge = scoring(lambda said, target: target in said.split())
    return Task(dataset=quiz(), solver=multiple_choice(), scorer=judge)


@planted("target-in-prompt", probes=["samples"])
def the_examples_are_samples() -> Task:
    shots = "\n".join(f"Q: {shot.input} A: {shot.target}" for shot in capitals()[:3])
    return Task(
        dataset=capitals(),
        solver=[system_message(f"Examples:\n{shots}"), generate()],
        scorer=match(location="exact"),
    )


@planted("same-prompt", probes=["samples"])
def the_template_eats_the_question() -> Task:
    def rewrite(state: TaskState) -> None:
        state.messages = [ChatMessageUser(content="Name the capital of that country.")]

    return Task(dataset=capitals(), solver=solving(rewrite), scorer=match())


@planted("prompt-echo", probes=["baselines"])
def reading_is_copying() -> Task:
    samples = [
        Sample(id=land, input=f"{town} is the capital of {land}. Which town is?", target=town)
        for land, town in CAPITALS.items()
    ]
    return Task(dataset=samples, scorer=includes())


@planted("constant-answer", probes=["baselines"])
def nearly_always_yes() -> Task:
    answers = {n: "no" if n == 3 else "yes" for n in range(10)}
    samples = ask_alike("Does statement number {} hold?", answers)
    return Task(dataset=samples, scorer=match(location="end"))


@planted("no-samples")
def a_filter_that_leaves_nothing() -> Task:
    task = Task(dataset=capitals(), scorer=match())
    task.dataset = task.dataset.filter(lambda sample: sample.target == "Atlantis")
    return task


@planted("no-gold")
def nobody_knows() -> Task:
    samples = [Sample(id=n, input=f"Write poem number {n}.") for n in range(6)]
    return Task(dataset=samples, scorer=scoring(lambda said, target: len(said.splitlines()) > 3))


@planted("budget-spent", budget=["3"])
def more_than_there_is_time_for() -> Task:
    return Task(dataset=capitals(), scorer=match())


def attempt(
    sample: str, reward: float | None, *, stop: str = "stop", failed: bool = False
) -> ModelAttempt:
    """One of a real model's attempts; those at one sample are a group."""
    cost = EpisodeCost(
        turns=1,
        prefilled=100,
        cached=0,
        sampled=50,
        trained=150,
        sandbox_seconds=0.0,
        seconds=1.0,
    )
    return ModelAttempt(
        sample=sample,
        group=sample,
        reward=reward,
        stop=stop,
        cost=cost,
        failed=failed,
        log="x.eval",
        epoch=1,
    )


TRIED = [
    *(attempt("France", 1.0, stop="max_tokens") for _ in range(4)),
    *(attempt("Italy", 0.0) for _ in range(4)),
    *(attempt("Spain", reward, failed=reward is None) for reward in (0.0, 1.0, 0.0, None)),
]


@planted(
    *("no-signal", "solved-by-all", "solved-by-none", "cut-replies", "failed-episodes"),
    "cost",
    attempts=TRIED,
    probes=["signal", "cost"],
)
def trained_on_what_is_known() -> Task:
    return Task(dataset=capitals(), scorer=match())


# solvers, tools and limits


@make_tool
async def atlas(country: str) -> str:
    """Look a country up.

    Args:
        country: Its name.
    """
    return CAPITALS.get(country, "unknown")


@planted("setup-fails", "episode-fails", "no-model-call", "tools-differ", probes=["samples"])
def something_is_wrong_in_every_other_country() -> Task:
    @make_solver
    async def fragile(state: TaskState, generate: Generate) -> TaskState:
        if state.sample_id == "Greece":
            raise FileNotFoundError("no map of Greece")
        if state.sample_id == "Norway":
            return state
        if state.sample_id == "Italy":
            state = await use_tools(atlas())(state, generate)
        state = await generate(state)
        if state.sample_id == "Spain":
            raise KeyError("answer")
        return state

    return Task(dataset=capitals(), solver=fragile(), scorer=match())


@planted("episode-fails", probes=["baselines", "scorer"])
def silence_is_an_error() -> Task:
    @make_solver
    async def strict(state: TaskState, generate: Generate) -> TaskState:
        state = await generate(state)
        if not state.output.completion:
            raise ValueError("nothing was said")
        return state

    return Task(dataset=capitals(), solver=strict(), scorer=match())


@planted("limit-too-small", probes=["gold"])
def no_room_for_an_answer() -> Task:
    return Task(
        dataset=capitals(),
        solver=react(tools=[atlas()]),
        scorer=match(location="exact"),
        message_limit=3,
    )


@planted("first-tool", probes=["baselines"])
def the_tool_answers() -> Task:
    @make_tool
    async def oracle(question: str) -> str:
        """Answer a question.

        Args:
            question: Any.
        """
        return str(store().get("town"))

    return Task(
        dataset=capitals(),
        solver=solving(
            lambda state: state.store.set("town", state.target.text), react(tools=[oracle()])
        ),
        scorer=match(location="exact"),
    )


# nothing wrong


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

    def shuffle(state: TaskState) -> None:
        last = state.sample_id in {"France", "Italy", "Spain", "Norway", "Greece"}
        state.choices.shuffle(OneLetter("ABCD".index(state.target.text), last))

    unlucky = solving(shuffle, multiple_choice())
    return Task(dataset=quiz(), solver=unlucky, scorer=choice())


def clean_agent() -> Task:
    return Task(
        dataset=capitals(),
        solver=react(tools=[atlas()]),
        scorer=match(location="exact"),
        message_limit=20,
    )


def clean_overlap() -> Task:
    """Some of the words of an answer pay a part; too many words cost."""
    names = ["Jane Austen", "Leo Tolstoy", "Toni Morrison", "Lu Xun", "Ama Ata Aidoo"]
    return Task(dataset=ask_alike("Who wrote book {}?", dict(enumerate(names))), scorer=f1())


def clean_several_targets() -> Task:
    return Task(dataset=ask_alike("The river of {}?", RIVERS), scorer=match(location="exact"))


def clean_ten_points() -> Task:
    def judge(said: str, target: str) -> float:
        answer = said.strip().rstrip(".").strip("*").rpartition(" ")[2]
        return 10.0 if answer.lower() == target.lower() else 0.0

    return Task(dataset=capitals(), scorer=scoring(judge))


def clean_tolerance() -> Task:
    """Far from the target costs, up to a limit; verdicts are remembered, and times are noted."""
    known: dict[tuple[str, str], float] = {}

    def judge(state: TaskState, target: Target) -> float:
        said = state.output.completion
        state.metadata["seconds"] = time.monotonic() - state.metadata["started"]
        if (said, target.text) not in known:
            known[said, target.text] = max(-1.0, distance(said, target.text))
        return known[said, target.text]

    start = solving(lambda state: state.metadata.update(started=time.monotonic()))
    return Task(dataset=sums(), solver=start, scorer=scoring_state(judge), time_limit=120)


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
    samples = ask_alike("What is constant number {}?", dict(enumerate(map(str, constants))))
    return Task(dataset=samples, scorer=scoring(judge))


def clean_comparisons() -> Task:
    """The order of words decides, there are more noes than yeses, and some texts are longer."""
    pairs = [(a, b) for a in (2, 3, 5, 7) for b in (2, 3, 5, 7) if a != b or a < 5]
    story = " Anna wrote both numbers on a wall, and asked her brother."
    samples = [
        Sample(
            id=n,
            input=f"Is {a} more than {b}?" + story * (n % 3),
            target="yes" if a > b else "no",
        )
        for n, (a, b) in enumerate(pairs)
    ]
    return Task(dataset=samples, scorer=match(location="exact"))


def clean_capitals_in_capitals() -> Task:
    """The answer is wanted in capitals, after examples that are none of the samples."""
    shots = "Q: What is the capital of Japan? A: TOKYO\nQ: What is the capital of Peru? A: LIMA"
    samples = capitals()
    for sample in samples:
        sample.target = str(sample.target).upper()
    solver = [system_message(shots), generate()]
    return Task(dataset=samples, solver=solver, scorer=match(location="exact", ignore_case=False))


CLEAN: dict[str, Callable[[], Task]] = {
    "match": lambda: Task(dataset=capitals(), scorer=match(location="exact")),
    "choices": lambda: Task(
        dataset=quiz(), solver=multiple_choice(shuffle=random.Random(7)), scorer=choice()
    ),
    "includes": lambda: Task(dataset=capitals(), scorer=includes()),
    "judge": lambda: graded(get_model("grading/compares")),
    "a judge that follows a script": lambda: graded(scripted_model(lambda request: "GRADE: C")),
    **{
        make.__name__: make
        for make in (
            *(clean_choices_with_luck, clean_agent, clean_overlap, clean_several_targets),
            *(clean_ten_points, clean_tolerance, clean_labels_in_turn, clean_comparisons),
            *(clean_numbers_of_questions, clean_capitals_in_capitals),
        )
    },
}
