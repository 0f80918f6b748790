"""What becomes of a logged sample: its branches, and which of the words are the model's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageUser,
    ModelOutput,
    get_model,
)
from inspect_ai.scorer import includes, model_graded_qa
from inspect_ai.solver import (
    Generate,
    Solver,
    TaskState,
    generate,
    self_critique,
    solver,
    use_tools,
)
from inspect_ai.tool import ToolCall
from tests.export.logged_runs import MODEL, add, adds_and_submits, agent, only_sample

from inspect_tinker_plugin.contracts.errors import ExportError
from inspect_tinker_plugin.export.rows import Conversation, conversations
from inspect_tinker_plugin.testing.replies import Script, call, say, scripted_model


def one(**options: Any) -> Task:
    return Task(dataset=[Sample(id=1, input="1 + 2", target="3")], **options)


def talks(task: Task, script: Script, folder: Path) -> list[Conversation]:
    return conversations(only_sample(task, script, folder), MODEL)


def lines(talk: Conversation) -> list[str]:
    """The conversation, a word of who speaks before each line; a star where it is trained on."""
    made = []
    for message, trained in zip(talk.messages, talk.trained, strict=True):
        calls = [each["function"]["name"] for each in message.get("tool_calls", ())]
        text = " ".join([message["content"].splitlines()[0] if message["content"] else "", *calls])
        made.append(f"{'*' if trained else ''}{message['role']}: {text.strip()}")
    return made


def test_an_agent_keeps_the_call_that_submits(tmp_path: Path) -> None:
    sample = only_sample(agent(1), adds_and_submits, tmp_path)
    (talk,) = conversations(sample, MODEL)
    assert lines(talk)[1:] == [
        "user: 1 + 2",
        "*assistant: I add. add",
        "tool: 3",
        "*assistant: submit",
    ]
    assert '"name":"submit"' in talk.tools
    # the final messages have it no more, and a model that imitates them never submits
    assert not [m for m in sample.messages if "submit" in str(getattr(m, "tool_calls", ""))]


def test_only_words_of_the_model_are_trained_on(tmp_path: Path) -> None:
    shots: list[ChatMessage] = [
        ChatMessageUser(content="1 + 1"),
        ChatMessageAssistant(content="2"),
        ChatMessageUser(content="1 + 2"),
    ]
    task = Task(dataset=[Sample(input=shots, target="3")], scorer=includes())
    (talk,) = talks(task, ["3"], tmp_path)
    assert lines(talk) == ["user: 1 + 1", "assistant: 2", "user: 1 + 2", "*assistant: 3"]


def test_a_judge_of_the_same_model_is_not_the_model(tmp_path: Path) -> None:
    task = one(scorer=model_graded_qa(model=None))
    (talk,) = talks(task, ["3", "GRADE: C"], tmp_path)
    assert lines(talk) == ["user: 1 + 2", "*assistant: 3"]


def test_another_model_is_not_the_model(tmp_path: Path) -> None:
    other = scripted_model(["better think", "GRADE: C"], name="other")
    task = one(solver=[generate(), self_critique(model=other)], scorer=includes())
    (talk,) = talks(task, ["4", "3"], tmp_path)
    said = [m["content"] for m, own in zip(talk.messages, talk.trained, strict=True) if own]
    assert said == ["4", "3"]
    assert "better think" in talk.messages[2]["content"]


@solver
def asking(prompts: list[list[str]], *, at_once: bool = False) -> Solver:
    """Calls the model with conversations that are built anew: user and assistant in turn."""

    async def ask(texts: list[str]) -> None:
        roles = [ChatMessageUser, ChatMessageAssistant]
        await get_model().generate([roles[n % 2](content=text) for n, text in enumerate(texts)])

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        if at_once:
            await asyncio.gather(*map(ask, prompts))
        else:
            for texts in prompts:
                await ask(texts)
        return state

    return solve


def test_a_reply_that_two_branches_share_is_trained_on_once(tmp_path: Path) -> None:
    prompts = [["a"], ["a", "A", "b"], ["a", "A", "c"]]
    found = talks(one(solver=asking(prompts)), ["A", "B", "C"], tmp_path)
    assert [lines(talk) for talk in found] == [
        ["user: a", "*assistant: A", "user: b", "*assistant: B"],
        ["user: a", "assistant: A", "user: c", "*assistant: C"],
    ]


def test_branches_that_take_turns_are_told_apart(tmp_path: Path) -> None:
    prompts = [["a"], ["b"], ["a", "A", "aa"], ["b", "B", "bb"]]
    found = talks(one(solver=asking(prompts)), ["A", "B", "AA", "BB"], tmp_path)
    assert [lines(talk) for talk in found] == [
        ["user: a", "*assistant: A", "user: aa", "*assistant: AA"],
        ["user: b", "*assistant: B", "user: bb", "*assistant: BB"],
    ]


def test_a_history_that_was_changed_begins_another_branch(tmp_path: Path) -> None:
    prompts = [["a"], ["a", "what it did not say", "b"]]
    found = talks(one(solver=asking(prompts)), ["A", "B"], tmp_path)
    assert [lines(talk) for talk in found] == [
        ["user: a", "*assistant: A"],
        ["user: a", "assistant: what it did not say", "user: b", "*assistant: B"],
    ]


def test_other_tools_are_another_branch(tmp_path: Path) -> None:
    task = one(solver=[generate(), use_tools(add()), generate()])
    found = talks(task, ["a", "b"], tmp_path)
    assert [talk.tools == "[]" for talk in found] == [True, False]


def test_a_reply_that_was_cut_is_not_trained_on(tmp_path: Path) -> None:
    prompts = [["a"], ["a", "cut", "b"]]
    script: Script = [say("cut", stop_reason="max_tokens"), "B"]
    (talk,) = talks(one(solver=asking(prompts)), script, tmp_path)
    assert lines(talk) == ["user: a", "assistant: cut", "user: b", "*assistant: B"]


def test_a_call_that_does_not_parse_is_not_trained_on(tmp_path: Path) -> None:
    broken = ToolCall(id="1", function="add", arguments={}, parse_error="no JSON")
    task = one(solver=[use_tools(add()), generate()])
    (talk,) = talks(task, [say("", broken), say("3")], tmp_path)
    assert talk.trained == [False, False, False, True]
    assert talk.messages[2]["content"].startswith("Error: ")


def test_a_reply_may_be_empty(tmp_path: Path) -> None:
    (talk,) = talks(one(), [say("")], tmp_path)
    assert lines(talk) == ["user: 1 + 2", "*assistant: "]


def test_thoughts_are_kept_and_encrypted_ones_are_not(tmp_path: Path) -> None:
    (talk,) = talks(one(), [say("3", reasoning="one and two")], tmp_path)
    assert talk.messages[-1] == {
        "role": "assistant",
        "content": "3",
        "reasoning_content": "one and two",
    }


@pytest.mark.parametrize(
    "reply", [say("3", stop_reason="max_tokens"), say("", stop_reason="unknown")]
)
def test_a_sample_without_words_to_train_on_says_so(reply: ModelOutput, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="none of the model's replies is whole"):
        talks(one(), [reply], tmp_path)


def test_a_sample_without_calls_says_so(tmp_path: Path) -> None:
    sample = only_sample(one(solver=asking([])), [], tmp_path)
    with pytest.raises(ExportError, match="no call of scripted/model"):
        conversations(sample, MODEL)


def test_arguments_stay_as_they_were_called(tmp_path: Path) -> None:
    task = one(solver=[use_tools(add()), generate()])
    (talk,) = talks(task, [say("", call("add", a=1, b=2)), say("3")], tmp_path)
    (made,) = talk.messages[1]["tool_calls"]
    assert made["function"] == {"name": "add", "arguments": '{"a":1,"b":2}'}
    assert talk.messages[2]["tool_call_id"] == made["id"]
