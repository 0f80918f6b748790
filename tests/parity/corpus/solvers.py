"""Solvers with their own control flow: critique, several calls, fork, cleanup, setup."""

from __future__ import annotations

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, GenerateConfig, get_model
from inspect_ai.scorer import exact, includes
from inspect_ai.solver import (
    Generate,
    Plan,
    TaskState,
    chain,
    fork,
    generate,
    self_critique,
    system_message,
)
from inspect_ai.util import store
from tests.functions import make_solver
from tests.parity.cases import Expect, case

from inspect_tinker_plugin.contracts.episodes import TurnRequest
from inspect_tinker_plugin.testing.replies import scripted_model


def greeting() -> Sample:
    return Sample(input="Say hello.", target="hello")


@case(
    script=["hallo", "It is not English.", "hello"],
    expect=Expect(turns=3, scores={"exact": "C"}, says=["It is not English."]),
)
def self_critique_by_the_policy() -> Task:
    return Task(dataset=[greeting()], solver=[generate(), self_critique()], scorer=exact())


@case(
    script=["hallo", "hello"],
    expect=Expect(turns=2, scores={"exact": "C"}, says=["Not English."], other_turns={"critic": 1}),
)
def self_critique_by_another_model() -> Task:
    critic = scripted_model(["Not English."], name="critic")
    return Task(
        dataset=[greeting()], solver=[generate(), self_critique(model=critic)], scorer=exact()
    )


@make_solver
async def twice(state: TaskState, generate: Generate) -> TaskState:
    """Draft, then improve, in one conversation."""
    state = await generate(state)
    state.messages.append(ChatMessageUser(content="Shorter."))
    return await generate(state, temperature=0.5)


@case(
    script=["hello, dear friend", "hello"],
    expect=Expect(
        turns=2,
        scores={"exact": "C"},
        holds=lambda trace: (
            [message["role"] for message in trace.requests[1]["messages"]]
            == ["user", "assistant", "user"]
        ),
    ),
)
def two_generate_calls() -> Task:
    return Task(dataset=[greeting()], solver=twice(), scorer=exact())


@make_solver
async def asks_the_model_itself(state: TaskState, generate: Generate) -> TaskState:
    """Uses `get_model()` beside the given `generate`."""
    side = await get_model().generate(
        [ChatMessageUser(content="Which language?")], config=GenerateConfig(temperature=0.1)
    )
    state.metadata["language"] = side.completion
    state.user_prompt.text += f" ({side.completion})"
    return await generate(state)


@case(
    script=["English", "hello"],
    expect=Expect(turns=2, scores={"exact": "C"}, says=["Say hello. (English)"]),
)
def solver_that_calls_get_model() -> Task:
    return Task(dataset=[greeting()], solver=asks_the_model_itself(), scorer=exact())


@make_solver
async def asks_in_a_role(state: TaskState, generate: Generate) -> TaskState:
    """Has the model under evaluation play a role by default, before and after a call of its own."""
    for _ in range(2):
        critic = get_model(role="critic", default=get_model())
        state.metadata["critic"] = (await critic.generate("Which language?")).completion
        state.output = await get_model().generate(state.messages)
    return state


@case(
    script=["English", "hallo", "English", "hello"],
    expect=Expect(
        turns=4,
        scores={"exact": "C"},
        holds=lambda trace: (
            [request["options"].get("seed") for request in trace.requests] == [None, 8, None, 8]
        ),
    ),
)
def options_of_the_task_in_a_role() -> Task:
    return Task(
        dataset=[greeting()],
        config=GenerateConfig(seed=8),
        solver=asks_in_a_role(),
        scorer=exact(),
    )


@make_solver
async def forks(state: TaskState, generate: Generate) -> TaskState:
    """Two continuations of one state; the second one is kept."""
    first, second = await fork(
        state,
        [
            chain(system_message("Dutch."), generate_and_note("nl")),
            chain(system_message("English."), generate_and_note("en")),
        ],
    )
    second.store.set("other", first.output.completion)
    return second


@make_solver
async def generate_and_note(state: TaskState, generate: Generate, key: str) -> TaskState:
    state = await generate(state)
    store().set(key, state.output.completion)
    return state


def _in_the_language_asked_for(request: TurnRequest) -> str:
    system = request.messages[0].text
    return "hallo" if system == "Dutch." else "hello"


@case(
    script=_in_the_language_asked_for,
    ordered=False,
    expect=Expect(turns=2, scores={"exact": "C"}, store={"other": "hallo"}),
)
def fork_into_two() -> Task:
    return Task(dataset=[greeting()], solver=forks(), scorer=exact())


@make_solver
async def no_model(state: TaskState, generate: Generate) -> TaskState:
    """Answers without asking the model."""
    state.output.completion = "hello"
    return state


@case(script=[], expect=Expect(turns=0, scores={"exact": "C"}))
def solver_without_a_model_call() -> Task:
    return Task(dataset=[greeting()], solver=no_model(), scorer=exact())


@make_solver
async def raises(state: TaskState, generate: Generate, message: str) -> TaskState:
    state = await generate(state)
    raise ValueError(message)


CLEANED: list[str] = []
"""What clean-up functions saw; a list in this module as the state is gone by then."""


async def remember(state: TaskState) -> None:
    CLEANED.append(state.output.completion)
    state.store.set("cleaned", True)


@case(
    script=["hello"],
    expect=Expect(turns=1, scores={"exact": "C"}, store={"cleaned": True}),
)
def task_cleanup() -> Task:
    return Task(dataset=[greeting()], cleanup=remember, scorer=exact())


@case(
    script=["hello"],
    expect=Expect(turns=1, error="ValueError", store={"cleaned": True}),
)
def task_cleanup_after_an_error() -> Task:
    return Task(dataset=[greeting()], solver=raises("no"), cleanup=remember, scorer=exact())


async def broken_cleanup(state: TaskState) -> None:
    raise RuntimeError("cannot clean up")


@case(script=["hello"], expect=Expect(turns=1, scores={"exact": "C"}))
def task_cleanup_that_raises() -> Task:
    return Task(dataset=[greeting()], cleanup=broken_cleanup, scorer=exact())


@make_solver
async def finishing(state: TaskState, generate: Generate) -> TaskState:
    state.store.set("finished", state.output.completion)
    return state


@case(
    script=["hello"],
    expect=Expect(
        turns=1, scores={"exact": "C"}, store={"finished": "hello", "plan cleaned": True}
    ),
)
def plan_with_finish_and_cleanup() -> Task:
    async def clean(state: TaskState) -> None:
        state.store.set("plan cleaned", True)

    return Task(
        dataset=[greeting()],
        solver=Plan([system_message("Be kind."), generate()], finish=finishing(), cleanup=clean),
        scorer=exact(),
    )


@make_solver
async def prepare(state: TaskState, generate: Generate) -> TaskState:
    state.store.set("prepared", True)
    state.user_prompt.text = f"Please: {state.user_prompt.text}"
    return state


@case(
    script=["hello"],
    expect=Expect(
        turns=1, scores={"exact": "C"}, store={"prepared": True}, says=["Please: Say hello."]
    ),
)
def task_setup() -> Task:
    return Task(dataset=[greeting()], setup=prepare(), solver=generate(), scorer=exact())


@case(
    script=["hello"],
    expect=Expect(turns=1, scores={"includes": "C"}, store={"prepared": True}),
)
def task_setup_list_with_model_call_after() -> Task:
    return Task(
        dataset=[greeting()],
        setup=[prepare(), system_message("Short.")],
        solver=[generate()],
        scorer=includes(),
    )


@make_solver
async def stops_early(state: TaskState, generate: Generate) -> TaskState:
    state.completed = True
    state.output.completion = "hello"
    return state


@case(script=[], expect=Expect(turns=0, scores={"exact": "C"}))
def completed_state_skips_later_solvers() -> Task:
    return Task(dataset=[greeting()], solver=[stops_early(), generate()], scorer=exact())


@case(
    script=[RuntimeError("the provider is down")],
    expect=Expect(turns=1, error="RuntimeError"),
    tokens="an error of the provider has no tokens",
)
def model_call_that_raises() -> Task:
    return Task(dataset=[greeting()], scorer=exact())
