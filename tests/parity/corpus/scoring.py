"""Scorers: lists, dict values, graders, scores inside a solver, failures, unscored samples."""

from __future__ import annotations

import math

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import (
    NOANSWER,
    PARTIAL,
    Score,
    Scorer,
    Target,
    accuracy,
    exact,
    f1,
    includes,
    mean,
    model_graded_fact,
    model_graded_qa,
    multi_scorer,
    pattern,
    score,
    scorer,
)
from inspect_ai.solver import Generate, TaskState, generate
from inspect_ai.util import LimitExceededError, store
from tests.functions import make_scorer, make_solver
from tests.parity.cases import Expect, case

from inspect_tinker_plugin.inspect_internals import TerminateSampleError
from inspect_tinker_plugin.options import EpisodeOptions
from inspect_tinker_plugin.testing.replies import scripted_model


def capital() -> list[Sample]:
    return [Sample(input="The capital of Norway?", target="Oslo", metadata={"country": "Norway"})]


@case(
    script=["It is Oslo."],
    expect=Expect(turns=1, scores={"includes": "C", "exact": "I", "f1": 0.5}),
)
def list_of_scorers() -> Task:
    return Task(dataset=capital(), scorer=[includes(), exact(), f1()])


@case(
    script=["Oslo"],
    expect=Expect(turns=1, scores={"includes": "C", "includes1": "C", "includes2": "C"}),
)
def scorers_with_one_name() -> Task:
    return Task(dataset=capital(), scorer=[includes(), includes(ignore_case=False), includes()])


@scorer(metrics={"length": [mean()], "right": [mean()]})
def several_values() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        answer = state.output.completion
        return Score(
            value={"length": len(answer), "right": target.text in answer},
            answer=answer,
            explanation="counted",
            metadata={"country": state.metadata["country"], "nested": {"a": [1, None]}},
        )

    return score


@case(
    script=["Oslo"],
    expect=Expect(turns=1, scores={"several_values": {"length": 4, "right": True}}),
)
def dict_score() -> Task:
    return Task(dataset=capital(), scorer=several_values())


@make_scorer(mean())
async def listed(state: TaskState, target: Target) -> Score:
    return Score(value=[1, 0.5, "C"], answer=None)


@case(script=["Oslo"], expect=Expect(turns=1, scores={"listed": [1, 0.5, "C"]}))
def list_score() -> Task:
    return Task(dataset=capital(), scorer=listed())


@make_scorer(mean())
async def tenth(state: TaskState, target: Target) -> Score:
    return Score(value=0.1)


@case(script=["Oslo"], expect=Expect(turns=1, scores={"tenth": 0.1}))
def small_credit() -> Task:
    return Task(dataset=capital(), scorer=tenth())


@make_scorer(accuracy())
async def gives(state: TaskState, target: Target, value: str) -> Score | None:
    match value:
        case "nan":
            return Score(value=math.nan)
        case "unscored":
            return Score.unscored(reason="no_answer", explanation="said nothing")
        case "none":
            return None
        case "noanswer":
            return Score(value=NOANSWER)
        case _:
            return Score(value=PARTIAL, answer="half")


@case(
    script=["Oslo"],
    expect=Expect(turns=1, scores={"includes": "C", "gives": math.nan}),
)
def nan_score() -> Task:
    return Task(dataset=capital(), scorer=[includes(), gives("nan")])


@case(
    script=["Oslo"],
    expect=Expect(
        turns=1,
        scores={"gives": math.nan},
        holds=lambda trace: trace.scores["gives"]["reason"] == "no_answer",
    ),
)
def unscored_sample() -> Task:
    return Task(dataset=capital(), scorer=gives("unscored"))


@case(script=["Oslo"], expect=Expect(turns=1, scores={"includes": "C"}))
def scorer_without_a_score() -> Task:
    return Task(dataset=capital(), scorer=[includes(), gives("none")])


@case(
    script=["Oslo"],
    expect=Expect(turns=1, scores={"gives": "N", "gives1": "P"}),
)
def partial_and_no_answer() -> Task:
    return Task(dataset=capital(), scorer=[gives("noanswer"), gives("partial")])


@case(script=["Oslo"], expect=Expect(turns=1))
def task_without_a_scorer() -> Task:
    return Task(dataset=capital())


@case(
    script=["the answer: Oslo"],
    expect=Expect(turns=1, scores={"pattern": "C"}),
)
def pattern_scorer() -> Task:
    return Task(dataset=capital(), scorer=pattern(r"answer: (\w+)"))


@make_scorer(accuracy())
async def fails(state: TaskState, target: Target) -> Score:
    raise ZeroDivisionError("no scores today")


@case(script=["Oslo"], expect=Expect(turns=1, scores={"includes": "C"}, error="ZeroDivisionError"))
def scorer_that_raises() -> Task:
    return Task(dataset=capital(), scorer=[includes(), fails(), exact()])


@case(
    script=["It is Oslo."],
    expect=Expect(
        turns=1,
        scores={"model_graded_qa": "C"},
        other_turns={"grader": 1},
        holds=lambda trace: "It is Oslo." in repr(trace.other_models["grader"]),
    ),
)
def grader_role_of_the_task() -> Task:
    return Task(
        dataset=capital(),
        scorer=model_graded_qa(),
        model_roles={"grader": scripted_model(["Fine.\nGRADE: C"], name="grader")},
    )


@case(
    script=["It is Oslo."],
    expect=Expect(turns=1, scores={"model_graded_qa": "P"}, other_turns={"grader": 1}),
)
def grader_with_history_and_partial_credit() -> Task:
    return Task(
        dataset=capital(),
        scorer=model_graded_qa(include_history=True, partial_credit=True),
        model_roles={"grader": scripted_model(["GRADE: P"], name="grader")},
    )


@case(
    script=["It is Oslo."],
    expect=Expect(
        turns=1,
        scores={"model_graded_fact": "C"},
        other_turns={"one": 1, "two": 1, "three": 1},
    ),
)
def several_graders_vote() -> Task:
    graders = [
        scripted_model([f"GRADE: {grade}"], name=name)
        for name, grade in (("one", "C"), ("two", "I"), ("three", "C"))
    ]
    return Task(dataset=capital(), scorer=model_graded_fact(model=list(graders)))


@case(
    script=["It is Oslo."],
    expect=Expect(turns=1, other_turns={"grader": 1}, error="ConnectionError"),
)
def grader_that_fails() -> Task:
    return Task(
        dataset=capital(),
        scorer=model_graded_qa(),
        model_roles={"grader": scripted_model([ConnectionError("judge is away")], name="grader")},
    )


@make_solver
async def scores_itself(state: TaskState, generate: Generate) -> TaskState:
    for attempt in range(3):
        state = await generate(state)
        given = await score(state)
        store().set(f"attempt {attempt}", [each.value for each in given])
        if given[0].value == "C":
            break
    return state


@case(
    script=["Bergen", "Oslo"],
    expect=Expect(
        turns=2,
        scores={"includes": "C", "exact": "C"},
        store={"attempt 0": ["I", "I"], "attempt 1": ["C", "C"]},
    ),
)
def score_in_a_solver() -> Task:
    return Task(dataset=capital(), solver=scores_itself(), scorer=[includes(), exact()])


@make_solver
async def gives_scores(state: TaskState, generate: Generate) -> TaskState:
    state = await generate(state)
    state.scores = {"effort": Score(value=0.5, answer=state.output.completion)}
    return state


@case(script=["Oslo"], expect=Expect(turns=1, scores={"includes": "C", "effort": 0.5}))
def scores_written_by_a_solver() -> Task:
    return Task(dataset=capital(), solver=gives_scores(), scorer=includes())


@make_solver
async def breaks(state: TaskState, generate: Generate, kind: str) -> TaskState:
    state = await generate(state)
    store().set("reached", True)
    match kind:
        case "terminate":
            raise TerminateSampleError("enough")
        case "limit":
            raise LimitExceededError("custom", value=2, limit=1, message="own limit")
        case "group":
            raise ExceptionGroup("several", [KeyError("inner")])
        case _:
            raise KeyError("broken")


@case(script=["Oslo"], expect=Expect(turns=1, error="KeyError", store={"reached": True}))
def solver_that_raises() -> Task:
    return Task(dataset=capital(), solver=breaks("error"), scorer=includes())


@case(script=["Oslo"], expect=Expect(turns=1, error="KeyError", store={"reached": True}))
def solver_that_raises_a_group() -> Task:
    return Task(dataset=capital(), solver=breaks("group"), scorer=includes())


@make_scorer(accuracy())
async def raises_a_group(state: TaskState, target: Target) -> Score:
    raise ExceptionGroup("several", [KeyError("inner")])


@case(script=["Oslo"], expect=Expect(turns=1, error="ExceptionGroup"))
def scorer_that_raises_a_group() -> Task:
    return Task(dataset=capital(), scorer=raises_a_group())


@case(
    script=["Oslo"],
    expect=Expect(turns=1, error="KeyError", scores={"includes": "C"}),
)
def score_on_error_of_the_task() -> Task:
    return Task(dataset=capital(), solver=breaks("error"), scorer=includes(), score_on_error=True)


@case(
    script=["Oslo"],
    options=EpisodeOptions(score_on_error=True),
    expect=Expect(turns=1, error="KeyError", scores={"includes": "C"}),
)
def score_on_error_of_the_run() -> Task:
    return Task(dataset=capital(), solver=breaks("error"), scorer=includes())


@case(
    script=["Oslo"],
    expect=Expect(turns=1, limit="operator", scores={"includes": "C"}, store={"reached": True}),
)
def terminate_sample_error() -> Task:
    return Task(dataset=capital(), solver=breaks("terminate"), scorer=includes())


@case(
    script=["Oslo"],
    expect=Expect(turns=1, limit="custom", scores={"includes": "C"}),
)
def limit_error_of_a_solver() -> Task:
    return Task(dataset=capital(), solver=breaks("limit"), scorer=includes())


@case(
    script=["It is Oslo."],
    expect=Expect(turns=1, scores={"multi_scorer": "C"}),
)
def several_scorers_reduced() -> Task:
    return Task(
        dataset=capital(),
        solver=generate(),
        scorer=multi_scorer([includes(), includes(), exact()], "mode"),
    )
