"""The comparison finds planted differences, and ignores only random values."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageAssistant, ContentText, ModelAPI, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, TaskState, generate, use_tools
from tests.functions import make_solver
from tests.parity.cases import Expect, load_corpus
from tests.rl.tasks import look

from inspect_tinker_plugin.episode.model import PolicyAPI
from inspect_tinker_plugin.options import EpisodeOptions
from inspect_tinker_plugin.testing import ScriptTurn, call, check_parity, check_parity_async, say
from inspect_tinker_plugin.testing.kit import Side
from inspect_tinker_plugin.testing.replies import ScriptedAPI
from inspect_tinker_plugin.testing.sides import Conditions, ParityError, run_episode, run_eval
from inspect_tinker_plugin.testing.traces import Trace, compare_traces, differences

SCRIPT: list[ScriptTurn] = [say("Look.", call("look", at="a"), call("look", at="b")), "seen"]


def looking(**limits: Any) -> Task:
    return Task(
        dataset=[Sample(input="Look.", target="seen", metadata={"n": 1})],
        solver=[use_tools(look()), generate()],
        scorer=includes(),
        **limits,
    )


async def traces() -> tuple[Trace, Trace]:
    return await run_eval(looking, SCRIPT), await run_eval(looking, SCRIPT)


async def test_two_evals_agree_with_each_other() -> None:
    first, second = await traces()
    assert compare_traces(first, second) == []


@make_solver
async def asks_with_a_cache(state: TaskState, generate: Generate) -> TaskState:
    """The same question three times, the last time by `generate`."""
    said = [await get_model().generate(state.messages, cache=True) for _ in range(2)]
    state.metadata["said"] = [each.completion for each in said]
    return await generate(state, cache=True)


@pytest.mark.parametrize("side", ["messages", "tokens"])
async def test_no_cache_answers_for_a_script(
    side: Side, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("INSPECT_CACHE_DIR", str(tmp_path))
    task = Task(dataset=[Sample(input="?", target="3")], solver=asks_with_a_cache())
    for _ in range(2):
        [report] = await check_parity_async(task, script=["1", "2", "3"], side=side)
        assert report.agrees, report.differences


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Set one place of a trace, e.g. ``requests.1.messages.0.content``."""

    def apply(parts: dict[str, Any]) -> None:
        *inside, last = [int(key) if key.isdigit() else key for key in path.split(".")]
        place: Any = parts
        for key in inside:
            place = place[key]
        if value is None:
            del place[last]
        else:
            place[last] = value

    return apply


PLANTED = {
    "score value": change("scores.includes.value", "I"),
    "score answer": change("scores.includes.answer", "other"),
    "score metadata": change("scores.includes.metadata", {"new": 1}),
    "score that is missing": change("scores.includes", None),
    "tool that is not offered": change("requests.0.tools.0", None),
    "tool with another name": change("requests.0.tools.0.name", "see"),
    "tool with another schema": change(
        "requests.1.tools.0.parameters.properties.at.type", "integer"
    ),
    "tool with another description": change("requests.0.tools.0.description", "See."),
    "tool choice": change("requests.0.tool_choice", "any"),
    "message the model saw": change("requests.0.messages.0.content", "Look!"),
    "message the model did not see": change("requests.1.messages.3", None),
    "tool result": change("messages.2.content", "a is gone"),
    "answer to another call": change("messages.2.tool_call_id", "id9"),
    "role of a message": change("messages.0.role", "system"),
    "argument of a call": change("messages.1.tool_calls.0.arguments.at", "c"),
    "type of an argument": change("tool_events.0.arguments.at", 1),
    "model call that is missing": change("requests.1", None),
    "option of a call": change("requests.0.options.temperature", 0.5),
    "final message that is missing": change("messages.4", None),
    "stop reason": change("output.choices.0.stop_reason", "max_tokens"),
    "limit": change("limit", {"type": "message", "limit": 5.0}),
    "error": change("error", {"type": "ValueError", "message": "x"}),
    "store": change("store.extra", 1),
    "metadata": change("metadata.n", 1.0),
    "metadata that is missing": change("metadata.n", None),
    "call of the grader": change("other_models.grader", []),
}


@pytest.mark.parametrize("planted", PLANTED.values(), ids=[*PLANTED])
async def test_a_planted_difference_is_found(planted: Callable[[dict[str, Any]], None]) -> None:
    trace = await run_eval(looking, SCRIPT)
    parts = copy.deepcopy(trace.comparable())
    planted(parts)
    assert len(compare_traces(trace, replace(trace, **parts))) >= 1


async def test_a_missing_limit_is_found() -> None:
    limited = await run_eval(lambda: looking(message_limit=3), SCRIPT[:1])
    unlimited = await run_eval(looking, SCRIPT)
    paths = {difference.path for difference in compare_traces(limited, unlimited)}
    assert {"limit", "requests[1]", "messages[4]"} <= paths


async def test_an_episode_of_another_task_is_found() -> None:
    expected = await run_eval(looking, SCRIPT)
    found = await run_episode(lambda: looking(token_limit=1), SCRIPT)
    assert "limit" in {difference.path for difference in compare_traces(expected, found)}


@pytest.mark.parametrize(
    ("left", "right"),
    [(1, 1.0), (1, True), (0, None), ("", None), ([], None), ({}, []), ({"a": None}, {})],
)
def test_values_of_different_kinds_differ(left: Any, right: Any) -> None:
    assert list(differences(left, right, "x"))


def test_what_an_evals_log_leaves_out_is_no_difference() -> None:
    @make_solver
    async def ask(state: TaskState, generate: Generate) -> TaskState:
        # as a reply comes back from a client of OpenAI's Responses API
        state.messages.append(ChatMessageAssistant(content=[ContentText(text="a")], tool_calls=[]))
        return await generate(state)

    check_parity(Task(solver=ask(), scorer=includes()), script=["x"])


def test_nan_agrees_with_nan() -> None:
    assert not list(differences({"a": float("nan")}, {"a": float("nan")}))


class Counter:
    """A task whose prompt says how often the task was run."""

    def __init__(self) -> None:
        self.runs = 0

    def task(self) -> Task:
        counter = self

        @make_solver
        async def counts(state: TaskState, generate: Generate) -> TaskState:
            counter.runs += 1
            state.user_prompt.text += f" ({counter.runs})"
            return await generate(state)

        return Task(dataset=[Sample(input="?", target="x")], solver=counts(), scorer=includes())


def test_check_parity_names_the_difference() -> None:
    with pytest.raises(AssertionError, match=r"requests\[0\].messages\[0\].content: eval '\? \(1"):
        check_parity(Counter().task(), script=["x"])


def test_check_parity_passes_samples_that_agree() -> None:
    task = Task(
        dataset=[Sample(input=text, target="x") for text in "abc"],
        solver=generate(),
        scorer=includes(),
    )
    assert [report.name for report in check_parity(task, script=["x"], samples=2)] == [
        "sample 1",
        "sample 2",
    ]


@pytest.mark.parametrize(
    ("script", "fault"),
    [([], "ran out after 0 turns"), (["a", "b", "c"], "2 unused replies")],
)
async def test_a_script_that_does_not_fit_is_no_agreement(
    script: list[ScriptTurn], fault: str
) -> None:
    task = Task(dataset=[Sample(input="?")], scorer=includes())
    [report] = await check_parity_async(task, script=script)
    assert not report.differences
    assert not report.agrees
    assert fault in report.faults[0]


async def test_an_unmet_expectation_is_a_fault_of_the_case() -> None:
    trace = await run_eval(looking, SCRIPT)
    faults = Expect(turns=3, scores={"includes": "I"}, says=["not said"], limit="time").faults(
        trace
    )
    assert [fault.split(":")[0] for fault in faults] == [
        "turns",
        "scores",
        "limit",
        "'not said' in the conversation",
    ]


async def test_an_option_without_a_counterpart_is_refused() -> None:
    with pytest.raises(ParityError, match="turn_limit"):
        await run_eval(looking, SCRIPT, Conditions(options=EpisodeOptions(max_turns=1)))


def test_scripted_models_can_do_what_the_policy_can() -> None:
    capabilities = {
        name
        for name, member in inspect.getmembers(ModelAPI, inspect.isfunction)
        if not name.startswith("_") and name not in NOT_CAPABILITIES
    }
    assert {"tool_result_images", "collapse_user_messages", "count_text_tokens"} <= capabilities
    for name in capabilities:
        assert getattr(ScriptedAPI, name) is getattr(PolicyAPI, name), name


NOT_CAPABILITIES = {
    "aclose",
    "canonical_name",
    "close",
    "connection_key",
    "generate",
    "initialize",
    "input_tokens_name",
    "max_connections",
    "model_family",
    "refresh_credentials",
    "should_retry",
    "service_model_name",
}
"""Names, connections and the life cycle of a provider; the rest declares its abilities."""


async def test_scripted_models_count_tokens_as_the_policy_does() -> None:
    model = get_model("scripted/other", memoize=False)
    assert await model.api.count_text_tokens("12345678") == 3
    assert ScriptedAPI.count_text_tokens is PolicyAPI.count_text_tokens


def test_a_folder_without_cases_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="holds no parity cases"):
        load_corpus(tmp_path)


def test_two_cases_with_one_id_are_refused(tmp_path: Any) -> None:
    module = """
from tests.parity.cases import Expect, case

@case(script=[], expect=Expect(turns=0))
def same(): ...
"""
    (tmp_path / "one.py").write_text(module)
    (tmp_path / "two.py").write_text(module)
    with pytest.raises(ValueError, match="cases with one id: same"):
        load_corpus(tmp_path)
