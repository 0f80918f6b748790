"""Several agents: a travel desk asks a timetable expert and hands over to a ticket clerk.

The expert is called like a tool (`as_tool`) and sees only the question it is asked; the
clerk takes over the conversation (`handoff`) and sees all of it.

    inspect eval example_tasks/travel_desk.py --model openai/gpt-4o-mini
"""

from __future__ import annotations

from inspect_ai import Task, task
from inspect_ai.agent import Agent, AgentSubmit, agent, as_tool, handoff, react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.tool import Tool, ToolError, tool

TRAINS = {
    "Northport": {"N1": "08:10-12:25", "N2": "08:40-11:50", "N3": "13:15-16:20"},
    "Southbay": {"S1": "07:30-09:05", "S2": "12:30-14:05", "S3": "21:45-23:20"},
    "Westhill": {"W1": "06:20-08:50", "W2": "10:20-12:20"},
}
FARES = {"N1": 70, "N2": 84, "N3": 70, "S1": 52, "S2": 52, "S3": 48, "W1": 60, "W2": 75}

SAMPLES = [
    Sample(id="north", input="I must be in Northport before noon.", target="N2 for 84 crowns"),
    Sample(id="south", input="I need the last train to Southbay.", target="S3 for 48 crowns"),
    Sample(id="west", input="I need the first train to Westhill.", target="W1 for 60 crowns"),
]


@task
def travel_desk() -> Task:
    return Task(dataset=SAMPLES, solver=desk(), scorer=match(location="exact"), message_limit=40)


@agent
def desk() -> Agent:
    return react(
        prompt="You run a travel desk. Ask the timetable expert which train suits the customer, "
        "hand over to the ticket clerk for its fare, then submit: <train> for <fare> crowns.",
        tools=[as_tool(timetable_expert()), handoff(ticket_clerk())],
        # Score the answer alone: an offer of every train at every fare must not pay.
        submit=AgentSubmit(answer_only=True),
    )


@agent
def timetable_expert() -> Agent:
    return react(
        name="timetable_expert",
        description="Knows every train: ask for the one that suits a destination and a time.",
        prompt="Look the destination up, then submit the name of the train that suits best.",
        tools=[trains_to()],
    )


@agent
def ticket_clerk() -> Agent:
    return react(
        name="ticket_clerk",
        description="Knows the fare of every train.",
        prompt="Look up the fare of the train in question and say it in one short sentence.",
        tools=[fare()],
        submit=False,
    )


@tool
def trains_to() -> Tool:
    async def execute(destination: str) -> str:
        """List the trains to a destination with their departures and arrivals.

        Args:
            destination: Name of the town.
        """
        if destination not in TRAINS:
            raise ToolError(f"No trains go to {destination!r}, only to {', '.join(TRAINS)}.")
        return "\n".join(f"{name}: {times}" for name, times in TRAINS[destination].items())

    return execute


@tool
def fare() -> Tool:
    async def execute(train: str) -> str:
        """Give the fare of a train in crowns.

        Args:
            train: Name of the train, e.g. N1.
        """
        if train not in FARES:
            raise ToolError(f"There is no train {train!r}.")
        return f"{FARES[train]} crowns"

    return execute
