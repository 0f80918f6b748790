"""A record that went through a part is in the log what it would have been without."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from inspect_ai._util.json import JsonChange  # private: what events of changes hold
from inspect_ai.dataset import Sample
from inspect_ai.event import (
    ErrorEvent,
    Event,
    InfoEvent,
    ModelEvent,
    SampleInitEvent,
    SandboxEvent,
    ScoreEvent,
    SpanBeginEvent,
    SpanEndEvent,
    StateEvent,
    StoreEvent,
    ToolEvent,
)
from inspect_ai.log import (
    EvalConfig,
    EvalDataset,
    EvalError,
    EvalLog,
    EvalPlan,
    EvalResults,
    EvalRetryError,
    EvalSample,
    EvalScore,
    EvalSpec,
    EvalStats,
    condense_sample,
    read_eval_log,
    write_eval_log,
)
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageTool,
    ChatMessageUser,
    ContentData,
    ContentImage,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    ModelCall,
    ModelOutput,
)
from inspect_ai.scorer import Score
from inspect_ai.tool import ToolCall, ToolCallContent, ToolInfo
from tests.logs.rollouts import apart

from inspect_tinker_plugin.logs import condensing
from inspect_tinker_plugin.logs.assembly import _write as write
from inspect_tinker_plugin.logs.eval_file import can_write
from inspect_tinker_plugin.logs.parts import read_part, write_part

LONG = "a long text that becomes an attachment " * 20
HOSTILE = {
    "plain": "an answer",
    "long": LONG,
    "half a pair": "\ud83d and \udc00",
    "zero": "a\x00b\x1b[2J",
    "lines": "a\nb\r\nc\u2028d\u0085e",
    "reference": "attachment://0123456789abcdef0123456789abcdef",
}


def record(text: str) -> EvalSample:
    reply = ChatMessageAssistant(content=text, metadata={text: text})
    return EvalSample(
        id="a/b c",
        epoch=1,
        input=[ChatMessageUser(content=text)],
        target=text,
        messages=[ChatMessageUser(content=text), reply],
        output=ModelOutput.from_content("rl/policy", text),
        scores={"s": Score(value=float("nan"), answer=text, metadata={"big": 2**80, "inf": 1e999})},
        metadata={"deep": {"er": [{"est": text}]}, "small": 5e-324, "large": [text] * 99},
        store={"kept": text},
        events=[InfoEvent(data={"text": LONG}), InfoEvent(data=text)],
    )


IMAGE = f"data:image/png;base64,{'iVBORw0KGgo' * 20}"
SHORT_IMAGE = "data:image/png;base64,iVBORw0KGgo"
CALL = ToolCall(
    id="1",
    function="look",
    arguments={"at": LONG, "deep": [{"er": LONG}]},
    view=ToolCallContent(format="text", content=LONG),
)
MESSAGES: dict[str, ChatMessage] = {
    "text": ChatMessageUser(content=LONG),
    "parts": ChatMessageUser(content=[ContentText(text=LONG), ContentImage(image=IMAGE)]),
    "short image": ChatMessageUser(content=[ContentImage(image=SHORT_IMAGE)]),
    "image as text": ChatMessageUser(content=IMAGE),
    "reasoning": ChatMessageAssistant(
        content=[ContentReasoning(reasoning=LONG), ContentText(text="so")], tool_calls=[CALL]
    ),
    "call": ChatMessageAssistant(content="", tool_calls=[CALL]),
    "result": ChatMessageTool(content=LONG, tool_call_id="1"),
    "data": ChatMessageAssistant(content=[ContentData(data={"of": LONG})]),
}
TOOL = ToolInfo(name="look", description=LONG)


def model_call(*messages: ChatMessage, **others: Any) -> ModelEvent:
    return ModelEvent(
        model="rl/policy",
        input=list(messages),
        tools=[TOOL],
        tool_choice="auto",
        config=GenerateConfig(temperature=0.5),
        output=ModelOutput.from_content("rl/policy", LONG),
        **others,
    )


def again(message: ChatMessage) -> ChatMessage:
    return message.model_copy(update={"id": "another"}, deep=True)


ONE, TWO = MESSAGES["text"], MESSAGES["parts"]
EVENTS: dict[str, list[Event]] = {
    "solver": [
        SpanBeginEvent(id="s", name="solver"),
        StateEvent(
            changes=[
                JsonChange(op="add", path="/a", value={"long": [LONG, {"er": LONG}], "n": None}),
                JsonChange(op="replace", path="/b", value=LONG, replaced=LONG),
                JsonChange(op="remove", path="/c"),
            ]
        ),
        StoreEvent(changes=[JsonChange(op="add", path="/a", value=LONG)]),
        SpanEndEvent(id="s"),
        ScoreEvent(score=Score(value="C", answer=LONG, explanation=LONG), target=LONG),
    ],
    "beginning": [SampleInitEvent(sample=Sample(input=LONG), state={"messages": [{"a": LONG}]})],
    "messages at the beginning": [SampleInitEvent(sample=Sample(input=[ONE, TWO]), state=None)],
    "calls": [
        model_call(ONE, TWO),
        model_call(again(ONE), again(TWO), MESSAGES["result"]),
        model_call(ONE, MESSAGES["result"], ONE, TWO),
        model_call(),
    ],
    "a logged call": [
        model_call(ONE, call=ModelCall(request={"messages": [{"a": LONG}]}, response={"b": LONG})),
        model_call(ONE),
    ],
    "tools": [
        ToolEvent(id="1", function="look", arguments={"at": LONG}, result=LONG, view=CALL.view),
        ToolEvent(id="2", function="look", arguments={}, result=[ContentImage(image=IMAGE)]),
        ToolEvent(id="3", function="look", arguments={}, events=[InfoEvent(data=LONG)]),
    ],
    "others": [
        InfoEvent(data={"a": LONG}),
        ErrorEvent(error=EvalError(message=LONG, traceback=LONG, traceback_ansi=LONG)),
        SpanBeginEvent(id="s", name="between"),
        SandboxEvent(action="exec", cmd=LONG, input=LONG, output=LONG),
    ],
}


def with_events(events: list[Event]) -> EvalSample:
    return record("x").model_copy(update={"events": events})


RECORDS = {
    **{name: record(text) for name, text in HOSTILE.items()},
    **{f"events: {name}": with_events(events) for name, events in EVENTS.items()},
    **{
        f"message: {name}": with_events([model_call(message), model_call(message)]).model_copy(
            update={"input": [message], "messages": [message]}
        )
        for name, message in MESSAGES.items()
    },
    "plain input": record("x").model_copy(update={"input": "x" * 6000, "choices": ["a", "b"]}),
    "no scores": record("x").model_copy(update={"scores": None}),
    "no answer": record("x").model_copy(update={"scores": {"s": Score(value=1)}}),
    "error": record("x").model_copy(
        update={"error": EvalError(message=LONG, traceback=LONG, traceback_ansi=LONG)}
    ),
    "retried": record("x").model_copy(
        update={
            "error_retries": [
                EvalRetryError(message="x", traceback="", traceback_ansi="", events=[model_call()])
            ]
        }
    ),
    "condensed before": condense_sample(with_events(EVENTS["calls"])),
    "long words": record("x" * 2000),
    "many words": record(" \t many words \u2003" * 500),
}


def made_log(samples: list[EvalSample]) -> EvalLog:
    spec = EvalSpec(
        eval_id="id",
        created="2026-01-01T00:00:00+00:00",
        task="task",
        dataset=EvalDataset(),
        model="rl/policy",
        config=EvalConfig(epochs=2),
        metadata={"no": None, "inf": float("inf")},
    )
    return EvalLog(
        status="cancelled",
        eval=spec,
        plan=EvalPlan(name="plan"),
        results=EvalResults(scores=[EvalScore(name="s", scorer="s")]),
        stats=EvalStats(started_at="2026-01-01T00:00:00+00:00"),
        samples=samples,
    )


def entries(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as log:
        assert len(set(log.namelist())) == len(log.namelist())
        assert log.testzip() is None
        return {
            name: json.dumps(json.loads(log.read(name)), sort_keys=True) for name in log.namelist()
        }


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_in_the_log_what_it_would_have_been_without_a_part(
    tmp_path: Path, name: str
) -> None:
    original = RECORDS[name]
    before = original.model_dump_json(fallback=str) if name not in HOSTILE else None
    write_part(tmp_path / "part", [original, original])
    assert before is None or before == original.model_dump_json(fallback=str)
    stored, other = read_part(tmp_path / "part")
    other.epoch = 2
    twice = original.model_copy(update={"epoch": 2})
    first = original.model_copy()
    for sample in (stored, other, first, twice):
        sample.scores = {"reward": Score(value=0.1, answer="x"), **(sample.scores or {})}
        sample.metadata = {**sample.metadata, "policy_step": 3}
    apart(write, made_log([stored, other]), tmp_path / "found.eval")
    apart(write_eval_log, made_log([first, twice]), str(tmp_path / "expected.eval"))
    found, expected = entries(tmp_path / "found.eval"), entries(tmp_path / "expected.eval")
    assert found == expected
    log = apart(read_eval_log, str(tmp_path / "found.eval"))
    assert log.samples is not None
    assert [sample.epoch for sample in log.samples] == [1, 2]
    assert len(log.samples[0].events) == len(original.events)


def test_common_records_take_the_fast_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def inspects(sample: EvalSample) -> EvalSample:
        left.append(len(sample.events))
        return condense_sample(sample)

    left: list[int] = []
    monkeypatch.setattr(condensing, "condense_sample", inspects)
    for events in ("solver", "beginning", "messages at the beginning", "calls"):
        condensing.condensed(with_events(EVENTS[events]))
    assert left == []
    condensing.condensed(with_events(EVENTS["tools"]))
    assert left == [2], "only those with files, or events inside"


def test_a_log_with_other_samples_is_left_to_inspect(tmp_path: Path) -> None:
    write_part(tmp_path / "part", [record("x")])
    assert can_write(made_log(read_part(tmp_path / "part")))
    assert not can_write(made_log([record("x")]))
    assert not can_write(made_log([]).model_copy(update={"version": 3}))


@pytest.mark.parametrize(
    "damage",
    [b"", b"[]\n", b"[]\n[]\n", b'{"id": 1, "epo', b"PK\x03\x04", b"\xff\n", b"\xff\n\xff\n"],
)
def test_a_damaged_part_is_an_error(tmp_path: Path, damage: bytes) -> None:
    write_part(tmp_path / "part", [record("x")])
    whole = (tmp_path / "part").read_bytes()
    (tmp_path / "part").write_bytes((whole + damage) if damage else whole[:-50])
    with pytest.raises(ValueError):
        read_part(tmp_path / "part")


def test_a_part_with_a_changed_byte_is_damaged(tmp_path: Path) -> None:
    write_part(tmp_path / "part", [record("an answer")])
    whole = (tmp_path / "part").read_bytes()
    at = whole.rindex(b"an answer")
    (tmp_path / "part").write_bytes(whole[:at] + b"no" + whole[at + 2 :])
    with pytest.raises(ValueError, match="damaged"):
        read_part(tmp_path / "part")


def test_half_pairs_in_model_calls_are_spelt_out(tmp_path: Path) -> None:
    """Inspect cannot condense such calls: its own evals fail to write their log."""
    text = HOSTILE["half a pair"]
    told = ChatMessageUser(content=text)
    call = ModelEvent(
        model="rl/policy",
        input=[told],
        tools=[],
        tool_choice="auto",
        config=GenerateConfig(),
        output=ModelOutput.from_content("rl/policy", text),
    )
    sample = EvalSample(id=1, epoch=1, input="?", target="", messages=[told], events=[call])
    write_part(tmp_path / "part", [sample])
    spec = EvalSpec(
        created="2026-01-01T00:00:00+00:00",
        task="task",
        dataset=EvalDataset(),
        model="rl/policy",
        config=EvalConfig(),
    )
    log = EvalLog(eval=spec, samples=[*read_part(tmp_path / "part")], status="success")
    path = tmp_path / "log.eval"
    apart(write_eval_log, log, str(path))
    [back] = apart(read_eval_log, str(path)).samples or []
    assert back.messages[0].text == "\\ud83d and \\udc00"
    [event] = back.events
    assert isinstance(event, ModelEvent)
    assert event.input[0].text == event.output.completion == back.messages[0].text
