"""A record that went through a part is in the log what it would have been without."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from inspect_ai._util.json import JsonChange  # private: what events of changes hold
from inspect_ai.dataset import Sample
from inspect_ai.event import (
    Event,
    InfoEvent,
    ModelEvent,
    SampleInitEvent,
    ScoreEvent,
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
    ChatMessageUser,
    ContentImage,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    ModelOutput,
)
from inspect_ai.scorer import Score
from inspect_ai.tool import ToolCall, ToolInfo
from tests.logs.rollouts import run_in_thread

from inspect_tinker_plugin.logs.staging import read_part, write_log, write_part

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
CALL = ToolCall(id="1", function="look", arguments={"at": LONG, "deep": [{"er": LONG}]})
ONE = ChatMessageUser(content=LONG)
TWO = ChatMessageUser(content=[ContentText(text=LONG), ContentImage(image=IMAGE)])
THREE = ChatMessageAssistant(
    content=[ContentReasoning(reasoning=LONG), ContentText(text="so")], tool_calls=[CALL]
)


def model_call(*messages: ChatMessage) -> ModelEvent:
    return ModelEvent(
        model="rl/policy",
        input=list(messages),
        tools=[ToolInfo(name="look", description=LONG)],
        tool_choice="auto",
        config=GenerateConfig(temperature=0.5),
        output=ModelOutput.from_content("rl/policy", LONG),
    )


CALLS: list[Event] = [
    SampleInitEvent(sample=Sample(input=[ONE, TWO]), state=None),
    model_call(ONE, TWO),
    ToolEvent(id="1", function="look", arguments={"at": LONG}, result=LONG),
    model_call(ONE, TWO, THREE),
    StoreEvent(changes=[JsonChange(op="add", path="/a", value=LONG)]),
    ScoreEvent(score=Score(value="C", answer=LONG, explanation=LONG), target=LONG),
]


def with_events(events: list[Event]) -> EvalSample:
    return record("x").model_copy(update={"events": events})


RECORDS = {
    **{name: record(text) for name, text in HOSTILE.items()},
    "calls": with_events(CALLS).model_copy(update={"input": [ONE, TWO], "messages": [ONE, TWO]}),
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
    "condensed before": condense_sample(with_events(CALLS)),
    "long words": record("x" * 2000),
    "many words": record(" \t many words \u2003" * 500),
}


def made_log(samples: list[EvalSample] | None = None) -> EvalLog:
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
    write_log(made_log(), [stored, other], tmp_path / "found.eval")
    run_in_thread(write_eval_log, made_log([first, twice]), str(tmp_path / "expected.eval"))
    found, expected = entries(tmp_path / "found.eval"), entries(tmp_path / "expected.eval")
    assert found == expected
    log = run_in_thread(read_eval_log, str(tmp_path / "found.eval"))
    assert log.samples is not None
    assert [sample.epoch for sample in log.samples] == [1, 2]
    assert len(log.samples[0].events) == len(original.events)


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


def test_half_pairs_in_model_calls_are_spelt_out(tmp_path: Path) -> None:
    """Inspect cannot condense such calls: its own evals fail to write their log."""
    text = HOSTILE["half a pair"]
    told = ChatMessageUser(content=text)
    call = model_call(told)
    call.output = ModelOutput.from_content("rl/policy", text)
    sample = EvalSample(id=1, epoch=1, input="?", target="", messages=[told], events=[call])
    write_part(tmp_path / "part", [sample])
    path = tmp_path / "log.eval"
    write_log(made_log(), read_part(tmp_path / "part"), path)
    [back] = run_in_thread(read_eval_log, str(path)).samples or []
    assert back.messages[0].text == "\\ud83d and \\udc00"
    [event] = back.events
    assert isinstance(event, ModelEvent)
    assert event.input[0].text == event.output.completion == back.messages[0].text
