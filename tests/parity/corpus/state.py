"""State that a sample carries: store, metadata, targets, dates, ids."""

from __future__ import annotations

from datetime import UTC, date, datetime

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, Target, accuracy, exact, includes
from inspect_ai.solver import Generate, TaskState, generate
from inspect_ai.util import StoreModel, store, store_as
from pydantic import Field
from tests.functions import make_scorer, make_solver
from tests.parity.cases import Expect, case


class Visits(StoreModel):
    places: list[str] = Field(default_factory=list)
    count: int = 0


@make_solver
async def changes_state(state: TaskState, generate: Generate) -> TaskState:
    state.metadata["seen"] = [1, 2.5, None, {"deep": True}]
    state.metadata.pop("gone")
    store().set("plain", {"n": 1})
    visits = store_as(Visits)
    visits.places.append("Oslo")
    visits.count += 1
    second = state.store_as(Visits, instance="second")
    second.count = 5
    state = await generate(state)
    store().delete("plain")
    store().set("last", state.output.completion)
    return state


@case(
    script=["yes"],
    expect=Expect(
        turns=1,
        scores={"exact": "C"},
        store={"Visits:places": ["Oslo"], "Visits:second:count": 5, "last": "yes"},
    ),
)
def store_and_metadata_changes() -> Task:
    sample = Sample(input="Yes?", target="yes", metadata={"gone": 1, "kept": "k"})
    return Task(dataset=[sample], solver=changes_state(), scorer=exact())


@case(script=["blue"], expect=Expect(turns=1, scores={"exact": "C", "includes": "C"}))
def list_of_targets() -> Task:
    sample = Sample(input="A colour?", target=["red", "blue"])
    return Task(dataset=[sample], scorer=[exact(), includes()])


@make_scorer(accuracy())
async def echo_target(state: TaskState, target: Target) -> Score:
    return Score(
        value=1 if state.output.completion in list(target) else 0,
        answer=state.output.completion,
        metadata={"target": list(target), "text": target.text, "id": state.sample_id},
    )


@case(script=["4"], expect=Expect(turns=1, scores={"echo_target": 1}))
def mixed_target_types() -> Task:
    samples = [
        Sample(input="2 + 2?", target="4", id="one"),
        Sample(input="a colour?", target=["red", "blue"], id=2),
        Sample(input="free"),
    ]
    return Task(dataset=samples, scorer=echo_target())


@make_scorer(accuracy())
async def reads_dates(state: TaskState, target: Target) -> Score:
    due = state.metadata["due"]
    assert isinstance(due, date)
    return Score(value=due.year == 2024, metadata={"due": due, "at": state.metadata["at"]})


@case(script=["ok"], expect=Expect(turns=1, scores={"reads_dates": True}))
def dates_in_metadata() -> Task:
    sample = Sample(
        input="When?",
        metadata={
            "due": date(2024, 2, 29),
            "at": datetime(2024, 2, 29, 12, 30, tzinfo=UTC),
            "bytes": b"raw",
            "tuple": (1, 2),
        },
    )
    return Task(dataset=[sample], solver=generate(), scorer=reads_dates())


@make_solver
async def reads_its_state(state: TaskState, generate: Generate) -> TaskState:
    """Writes down what a solver can read about its sample."""
    store().set("id", state.sample_id)
    store().set("epoch", state.epoch)
    store().set("input", state.input_text)
    store().set("target", state.target.text)
    store().set("limits", [state.message_limit, state.token_limit])
    return await generate(state)


@case(
    script=["ok"],
    expect=Expect(
        turns=1,
        scores={"echo_target": 0},
        store={"id": 1, "epoch": 1, "input": "Hm?", "limits": [40, 100_000]},
    ),
)
def sample_seen_by_a_solver() -> Task:
    return Task(
        dataset=[Sample(input="Hm?", target="x")],
        solver=reads_its_state(),
        scorer=echo_target(),
        message_limit=40,
        token_limit=100_000,
    )
