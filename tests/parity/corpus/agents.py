"""Agents: `basic_agent`, `react` in its forms, hand-offs, agents as tools, compaction."""

from __future__ import annotations

from inspect_ai import Task
from inspect_ai.agent import (
    Agent,
    AgentAttempts,
    AgentPrompt,
    AgentState,
    AgentSubmit,
    agent,
    as_solver,
    as_tool,
    handoff,
    last_message,
    react,
    remove_tools,
    run,
)
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, CompactionTrim, ModelOutput, get_model
from inspect_ai.scorer import Score, includes
from inspect_ai.solver import Generate, Solver, TaskState, basic_agent, system_message
from inspect_ai.tool import Tool
from inspect_ai.util import collect, message_limit
from tests.functions import make_solver, make_tool
from tests.parity.cases import Expect, case

from inspect_tinker_plugin.contracts.episodes import TurnRequest
from inspect_tinker_plugin.testing.replies import call, say, scripted_model, submit


def solved_by(solver: Solver | Agent) -> Task:
    sample = Sample(input="What is 6 times 7?", target="42")
    return Task(dataset=[sample], solver=solver, scorer=includes())


@make_tool
async def multiply(x: int, y: int) -> int:
    """Multiply.

    Args:
        x: First.
        y: Second.
    """
    return x * y


WORK = say("I multiply.", call("multiply", x=6, y=7))


@case(
    script=[WORK, submit("42")],
    expect=Expect(turns=2, scores={"includes": "C"}, tools=["multiply", "submit"]),
)
def basic_agent_with_tool() -> Task:
    return solved_by(basic_agent(tools=[multiply()]))


@case(
    script=["Hm.", say("", call("done", answer="41")), say("", call("done", answer="42"))],
    expect=Expect(
        turns=3,
        scores={"includes": "C"},
        tools=["done"],
        says=["Keep going", "Not that one"],
    ),
)
def basic_agent_with_attempts() -> Task:
    agent = basic_agent(
        init=system_message("You reckon."),
        max_attempts=3,
        incorrect_message="Not that one.",
        continue_message="Keep going.",
        submit_name="done",
    )
    return solved_by(agent)


@case(
    script=[WORK, submit("42", "I know.")],
    expect=Expect(turns=2, scores={"includes": "C"}, tools=["multiply", "submit"]),
)
def react_with_tool() -> Task:
    return solved_by(react(tools=[multiply()]))


@case(
    script=[submit("1"), submit("2"), submit("42")],
    expect=Expect(turns=3, scores={"includes": "C"}, says=["Wrong: I"]),
)
def react_with_attempts() -> Task:
    async def incorrect(state: AgentState, scores: list[Score]) -> str:
        return f"Wrong: {scores[0].value}"

    return solved_by(react(attempts=AgentAttempts(attempts=3, incorrect_message=incorrect)))


@case(
    script=[submit("1"), submit("2")],
    expect=Expect(turns=2, scores={"includes": "I"}),
)
def react_that_uses_up_its_attempts() -> Task:
    return solved_by(react(attempts=2))


@make_tool
async def final(number: int) -> str:
    """Give the number.

    Args:
        number: The number.
    """
    return f"<{number}>"


@case(
    script=[say("So:", call("give", number=42))],
    expect=Expect(turns=1, scores={"includes": "C"}, tools=["give"]),
)
def react_with_custom_submit() -> Task:
    given = AgentSubmit(
        name="give", description="Give it.", tool=final(), answer_only=True, keep_in_messages=True
    )
    return solved_by(react(submit=given))


@case(
    script=["The answer is 42."],
    expect=Expect(turns=1, scores={"includes": "C"}, tools=[]),
)
def react_without_submit() -> Task:
    return solved_by(react(submit=False))


@case(
    script=["Let me see.", "Nearly.", submit("42")],
    expect=Expect(turns=3, scores={"includes": "C"}, says=["Use submit, please."]),
)
def react_on_continue_text() -> Task:
    return solved_by(react(on_continue="Use {submit}, please."))


@case(
    script=[WORK, "Thinking.", "It is 42."],
    expect=Expect(turns=3, scores={"includes": "C"}, says=["Say it."]),
)
def react_on_continue_function() -> Task:
    async def decide(state: AgentState) -> bool | str:
        if state.output.message.tool_calls:
            return True
        return "42" not in state.output.completion and "Say it."

    return solved_by(react(tools=[multiply()], submit=False, on_continue=decide))


@case(
    script=[submit("42")],
    expect=Expect(turns=1, scores={"includes": "C"}, says=["Be exact."]),
)
def react_with_own_prompt() -> Task:
    prompt = AgentPrompt(
        instructions="Be exact.", assistant_prompt=None, submit_prompt="Call {submit}."
    )
    return solved_by(react(prompt=prompt))


@case(
    script=[submit("42")],
    expect=Expect(turns=1, scores={"includes": "C"}, other_turns={"drafts": 1}),
)
def react_where_a_sub_agent_has_another_model() -> Task:
    drafts = scripted_model([submit("a draft")], name="drafts")

    @make_solver
    async def two_agents(state: TaskState, generate: Generate) -> TaskState:
        draft = await run(react(model=drafts), state.input_text)
        state.store.set("draft", draft.output.completion)
        done = await run(react(), state.messages)
        state.messages, state.output = done.messages, done.output
        return state

    return solved_by(two_agents())


def reckoner(name: str = "reckoner") -> Agent:
    return react(name=name, description="Reckons.", prompt="You reckon.", tools=[multiply()])


@case(
    script=[
        say("Over to you.", call("transfer_to_reckoner")),
        WORK,
        submit("42", "It is"),
        submit("42"),
    ],
    expect=Expect(
        turns=4,
        scores={"includes": "C"},
        tools=["submit", "transfer_to_reckoner"],
        says=["[reckoner]"],
    ),
)
def handoff_to_a_sub_agent() -> Task:
    return solved_by(react(tools=[handoff(reckoner())]))


@case(
    script=[
        say("Do it.", call("multiplier")),
        submit("42", "Reckoned:"),
        submit("42"),
    ],
    expect=Expect(turns=3, scores={"includes": "C"}, tools=["submit", "multiplier"]),
)
def handoff_with_filters() -> Task:
    sub = handoff(
        reckoner(), tool_name="multiplier", input_filter=remove_tools, output_filter=last_message
    )
    return solved_by(react(tools=[sub]))


@case(
    script=[
        say("Ask.", call("reckoner", input="6 times 7?")),
        WORK,
        submit("42"),
        submit("42"),
    ],
    expect=Expect(turns=4, scores={"includes": "C"}, tools=["submit", "reckoner"]),
)
def agent_as_tool() -> Task:
    return solved_by(react(tools=[as_tool(reckoner())]))


@case(
    script=[
        say("Ask.", call("reckoner", input="6 times 7?")),
        WORK,
        WORK,
        submit("42"),
    ],
    expect=Expect(turns=4, scores={"includes": "C"}, says=["limit"]),
)
def agent_as_tool_with_its_own_limit() -> Task:
    limited = as_tool(reckoner(), limits=[message_limit(6)])
    return solved_by(react(tools=[limited]))


def _several_at_once(request: TurnRequest) -> ModelOutput:
    """The root calls both sub-agents in one reply; each sub-agent submits its own name."""
    messages = request.messages
    system = next((m.text for m in messages if m.role == "system"), "")
    if "You are left" in system:
        return submit("left says 6")
    if "You are right" in system:
        return submit("right says 7")
    if any(message.role == "tool" for message in messages):
        return submit("42")
    return say("Both.", call("left", input="6?"), call("right", input="7?"))


@case(
    script=_several_at_once,
    ordered=False,
    expect=Expect(turns=4, scores={"includes": "C"}, says=["left says 6", "right says 7"]),
)
def sub_agents_in_parallel() -> Task:
    def side(name: str) -> Tool:
        return as_tool(react(name=name, description=name, prompt=f"You are {name}."))

    return solved_by(react(tools=[side("left"), side("right")]))


@agent
def own_loop() -> Agent:
    """An agent that is written by hand."""

    async def execute(state: AgentState) -> AgentState:
        for _ in range(3):
            messages, output = await get_model().generate_loop(state.messages, tools=[multiply()])
            state.output = output
            state.messages.extend(messages)
            if "42" in output.completion:
                break
            state.messages.append(ChatMessageUser(content="And?"))
        return state

    return execute


@case(
    script=[WORK, "Soon.", "42"],
    expect=Expect(turns=3, scores={"includes": "C"}, says=["And?"]),
)
def agent_written_by_hand() -> Task:
    return solved_by(as_solver(own_loop()))


@make_solver
async def collects(state: TaskState, generate: Generate) -> TaskState:
    """Asks three times at once."""

    async def one(name: str) -> str:
        return (await get_model().generate(f"Say {name}.")).completion

    said = await collect(*[one(name) for name in "abc"])
    state.output.completion = "".join(said)
    return state


@case(
    script=lambda request: request.messages[-1].text[4],
    ordered=False,
    expect=Expect(turns=3, scores={"includes": "C"}),
)
def model_asked_from_several_coroutines() -> Task:
    return Task(dataset=[Sample(input="?", target="abc")], solver=collects(), scorer=includes())


@case(
    script=[
        *[say(f"Try {n}. " + "x" * 400, call("multiply", x=n, y=7)) for n in range(8)],
        submit("42"),
    ],
    expect=Expect(
        turns=9,
        scores={"includes": "C"},
        holds=lambda trace: (
            len(trace.requests[8]["messages"]) < len(trace.requests[5]["messages"]) + 6
        ),
    ),
    tokens="when to compact depends on the count of tokens",
)
def react_with_compaction() -> Task:
    return solved_by(
        react(tools=[multiply()], compaction=CompactionTrim(threshold=900, memory=False))
    )


@case(
    script=[WORK, WORK, WORK, say("Cut.", stop_reason="model_length"), submit("42")],
    expect=Expect(
        turns=5,
        scores={"includes": "C"},
        holds=lambda trace: len(trace.requests[4]["messages"]) < len(trace.requests[3]["messages"]),
    ),
    tokens="the sampler has one way to be cut",
)
def react_with_truncation() -> Task:
    return solved_by(react(truncation="auto"))
