"""Solvers that shape the prompt: templates, system messages, few-shot, chain of thought."""

from __future__ import annotations

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageUser,
    GenerateConfig,
)
from inspect_ai.scorer import answer, exact, includes, match
from inspect_ai.solver import (
    assistant_message,
    chain,
    chain_of_thought,
    generate,
    prompt_template,
    system_message,
    user_message,
)
from tests.parity.cases import Expect, case

SUM = Sample(input="What is 2 + 2?", target="4", metadata={"unit": "apples"})


@case(script=["4"], expect=Expect(turns=1, scores={"exact": "C"}))
def plain_generate() -> Task:
    return Task(dataset=[SUM.model_copy()], scorer=exact())


@case(
    script=["It is 4 apples."],
    expect=Expect(
        turns=1, scores={"includes": "C"}, says=["Answer in apples: What is 2 + 2? (so)"]
    ),
)
def prompt_template_with_metadata_and_params() -> Task:
    template = prompt_template("Answer in {unit}: {prompt} ({hint})", hint="so")
    return Task(dataset=[SUM.model_copy()], solver=[template, generate()], scorer=includes())


@case(
    script=["4"],
    expect=Expect(turns=1, scores={"match": "C"}, says=["You count apples.", "Think first."]),
)
def system_message_then_more_messages() -> Task:
    return Task(
        dataset=[SUM.model_copy()],
        solver=[
            system_message("You count {unit}."),
            user_message("Think first."),
            assistant_message("I will."),
            user_message("Go on."),
            generate(),
        ],
        scorer=match(),
    )


@case(script=["6"], expect=Expect(turns=1, scores={"exact": "C"}, says=["What is 1 + 1?"]))
def few_shot_messages_in_the_input() -> Task:
    messages: list[ChatMessage] = [
        ChatMessageSystem(content="Only numbers."),
        ChatMessageUser(content="What is 1 + 1?"),
        ChatMessageAssistant(content="2"),
        ChatMessageUser(content="What is 3 + 3?"),
    ]
    return Task(dataset=[Sample(input=messages, target="6")], scorer=exact())


@case(
    script=["2 and 2 is 4.\n\nANSWER: 4"],
    expect=Expect(turns=1, scores={"answer": "C"}, says=["step-by-step"]),
)
def chain_of_thought_prompt() -> Task:
    return Task(
        dataset=[SUM.model_copy()],
        solver=[chain_of_thought(), generate()],
        scorer=answer("line"),
    )


@case(script=["4"], expect=Expect(turns=1, scores={"exact": "C"}))
def nested_chain() -> Task:
    inner = chain(system_message("Be brief."), prompt_template("{prompt}!"))
    return Task(dataset=[SUM.model_copy()], solver=chain(inner, generate()), scorer=exact())


@case(
    script=["4"],
    expect=Expect(
        turns=1,
        scores={"exact": "C"},
        holds=lambda trace: (
            trace.requests[0]["options"]["temperature"] == 0.25
            and trace.requests[0]["options"]["stop_seqs"] == ["END"]
            and trace.requests[0]["options"]["max_tokens"] == 99
        ),
    ),
)
def generate_options_of_task_and_solver() -> Task:
    return Task(
        dataset=[SUM.model_copy()],
        config=GenerateConfig(temperature=0.25, max_tokens=7, timeout=9, stream_idle_timeout=9),
        solver=generate(max_tokens=99, stop_seqs=["END"]),
        scorer=exact(),
    )
