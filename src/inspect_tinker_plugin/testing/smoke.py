"""A few parity cases that take seconds: does an untried release do what the tested ones do?

``python -m inspect_tinker_plugin.testing.smoke`` ends with 0 when episodes agree with evals, with 1
and the first difference when they do not, and with 2 when this machine is to blame. Each case
exercises much of Inspect at once; ``tests/parity`` tests the parts separately.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence

from inspect_ai import Task
from inspect_ai.agent import as_tool, react
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageSystem, ChatMessageUser, GenerateConfig
from inspect_ai.scorer import (
    Score,
    Scorer,
    Target,
    choice,
    includes,
    match,
    mean,
    model_graded_qa,
    scorer,
)
from inspect_ai.solver import (
    Generate,
    Solver,
    TaskState,
    chain_of_thought,
    fork,
    generate,
    multiple_choice,
    prompt_template,
    solver,
    system_message,
    use_tools,
)
from inspect_ai.tool import Tool, ToolError, bash, tool
from inspect_ai.util import store

from inspect_tinker_plugin.testing.kit import Side, check_parity_async, describe
from inspect_tinker_plugin.testing.replies import Script, call, say, scripted_model, submit


@tool
def count() -> Tool:
    async def execute(text: str, letter: str = "a") -> int:
        """Count a letter.

        Args:
            text: Where to look.
            letter: What to count.
        """
        if len(letter) != 1:
            raise ToolError("one letter, please")
        counted = text.count(letter)
        store().set("counted", [*store().get("counted", []), counted])
        return counted

    return execute


@solver
def asks_twice() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state = await generate(state, temperature=0.5)
        state.messages.append(ChatMessageUser(content="Sure?"))
        state.metadata["asked"] = True
        return await generate(state)

    return solve


@solver
def forks() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        [branch] = await fork(state, [asks_twice()])
        store().set("branch", branch.output.completion)
        return state

    return solve


@scorer(metrics={"length": [mean()], "right": [mean()]})
def length() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        answer = state.output.completion
        value = {"length": len(answer), "right": answer == target.text}
        return Score(value=value, metadata={"turns": len(state.messages)})

    return score


def conversation() -> Task:
    return Task(
        dataset=[Sample(input="Six times seven?", target=["42", "forty-two"], metadata={"n": 6})],
        solver=[
            forks(),
            system_message("Mind the {n}."),
            prompt_template("Q: {prompt} (n is {n})"),
            chain_of_thought(),
            asks_twice(),
        ],
        scorer=[match(numeric=True), length()],
        config=GenerateConfig(max_tokens=99, stop_seqs=["\n\n"]),
    )


def agent() -> Task:
    helper = react(name="helper", description="Helps.", tools=[count()])
    return Task(
        dataset=[
            Sample(
                input=[ChatMessageSystem(content="Work."), ChatMessageUser(content="How many?")],
                target="3",
            )
        ],
        solver=react(tools=[count(), as_tool(helper)], attempts=2),
        scorer=model_graded_qa(),
        model_roles={"grader": scripted_model(["GRADE: I", "GRADE: C"], name="grader")},
    )


def boxed() -> Task:
    sample = Sample(input="Read.", target="secret", files={"a.txt": "the secret"}, id="file")
    return Task(
        dataset=[sample],
        solver=[use_tools(bash()), generate()],
        scorer=includes(),
        sandbox="local",
        message_limit=5,
    )


def choices() -> Task:
    sample = Sample(input="Largest?", choices=["ant", "bee", "cow"], target="C")
    return Task(dataset=[sample], solver=multiple_choice(), scorer=choice())


CASES: Sequence[tuple[Callable[[], Task], Script]] = (
    (conversation, ["a", "b", "I think it is 41.", "ANSWER: 42"]),
    (
        agent,
        [
            say("", call("count", text="banana"), call("count", text="b", letter="ab")),
            say("", call("count", words=1), call("no_such_tool", x=1)),
            say("I ask.", call("helper", input="How many in banana?")),
            submit("three"),
            submit("2"),
            submit("3"),
        ],
    ),
    (
        boxed,
        [say("", call("bash", cmd="cat a.txt | tee b.txt")), say("", call("bash", cmd="false"))],
    ),
    (choices, ["ANSWER: C"]),
)
"""Tasks, and scripts that fit them: a run that plays another number of replies is no agreement."""


async def find_difference() -> str | None:
    """Play all cases; return the first line that describes a difference, or ``None``."""
    sides: tuple[Side, ...] = ("messages", "tokens")
    for task, script in CASES:
        for side in sides:
            [report] = await check_parity_async(task, script=script, side=side)
            if not report.agrees:
                return f"{task.__name__} in {side}: {' '.join(describe(report)[1].split())}"
    return None


def main() -> int:
    """Print the first difference, if there is one."""
    try:
        found = asyncio.run(find_difference())
    except (OSError, MemoryError) as error:  # a full disk, say: nothing about the release
        print(f"{type(error).__name__}: {error}")
        return 2
    if found is not None:
        print(found)
    return 0 if found is None else 1


if __name__ == "__main__":
    sys.exit(main())
