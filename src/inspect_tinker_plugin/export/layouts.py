"""Layouts: the columns that a trainer's released code reads, their types, and rows of them.

A schema never depends on data.

=============  ==========================================================================
``chat``       this project's own: messages in OpenAI's form, tools as JSON
``trl``        TRL's ``SFTTrainer``, ``DPOTrainer``, ``RewardTrainer``, ``KTOTrainer`` and, of
               prompts, ``GRPOTrainer``
``verl``       verl's ``RLHFDataset`` (prompts) and ``MultiTurnSFTDataset``
``verifiers``  the wire form of a verifiers task (prompts), with completion and reward
``tinker``     the cookbook's ``FromConversationFileBuilder`` and ``ComparisonBuilderFromJsonl``
=============  ==========================================================================
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from inspect_tinker_plugin.contracts.errors import ConfigError, ExportError
from inspect_tinker_plugin.export.options import LAYOUTS, Form, Layout
from inspect_tinker_plugin.export.rows import Conversation

if TYPE_CHECKING:
    from datasets import Features

Row = Mapping[str, Any]
"""A row: its values by column."""

Kind = Literal[
    "text", "json", "int", "float", "bool", "messages", "comparison", "verl_reward", "verl_info"
]
"""The type of a column; ``json`` is text in the files, and parsed by ``datasets``."""

RICH_KEYS = ("reasoning_content", "tool_calls", "tool_call_id", "name")
"""Keys of a message beside role and content; only in exports where a message needs them."""

_STRUCTS: dict[str, dict[str, str]] = {
    "verl_reward": {"style": "text", "ground_truth": "text"},
    "verl_info": {"index": "int", "id": "text", "info": "text"},
}
_COMPARED_PARTS = ("prompt_conversation", "completion_A", "completion_B")


@dataclass(frozen=True)
class Schema:
    """Columns and types of an export.

    Messages have :data:`RICH_KEYS` in all files of an export or in none: chat templates tell an
    assistant message with tool calls by the presence of the key, so plain exports do without.
    """

    columns: Mapping[str, Kind]
    """The columns in their order."""

    flat_calls: bool = False
    """Whether a tool call has name and arguments beside its id, and not in ``function``."""

    marked: bool = False
    """Whether each message says in ``trainable`` if it is to be trained on."""

    def features(self, *, rich: bool) -> Features:
        """Return the types of the columns for ``datasets``."""
        from datasets import Features, List

        messages = List(self._message(rich=rich))
        kinds: dict[str, Any] = {
            **{kind: _value(kind) for kind in ("text", "int", "float", "bool")},
            **{
                kind: {name: _value(of) for name, of in struct.items()}
                for kind, struct in _STRUCTS.items()
            },
            "json": _json_value() if "json" in self.columns.values() else None,
            "messages": messages,
            "comparison": dict.fromkeys(_COMPARED_PARTS, messages),
        }
        return Features({name: kinds[kind] for name, kind in self.columns.items()})

    def is_rich(self, row: Row) -> bool:
        """Whether a message of a row has any of :data:`RICH_KEYS`."""
        return any(
            key in message
            for messages in self._conversations(row)
            for message in messages
            for key in RICH_KEYS
        )

    def _conversations(self, row: Row) -> Iterator[list[dict[str, Any]]]:
        for name, kind in self.columns.items():
            if kind == "messages":
                yield row[name]
            elif kind == "comparison":
                yield from (row[name][part] for part in _COMPARED_PARTS)

    def _message(self, *, rich: bool) -> dict[str, Any]:
        from datasets import List

        text = _value("text")
        message: dict[str, Any] = {"role": text, "content": text}
        if self.marked:
            message["trainable"] = _value("bool")
        if rich:
            function = {"name": text, "arguments": text}
            named = function if self.flat_calls else {"function": function}
            message |= {
                "reasoning_content": text,
                "tool_calls": List({"id": text, "type": text, **named}),
                "tool_call_id": text,
                "name": text,
            }
        return message


def _value(kind: str) -> Any:
    from datasets import Value

    types = {"text": "string", "int": "int64", "float": "float64", "bool": "bool"}
    return Value(types[kind])


def _json_value() -> Any:
    try:
        from datasets import Json
    except ImportError as error:
        raise ConfigError(
            "this layout needs datasets 4.7 or newer, as its trainer does: pip install -U datasets"
        ) from error
    return Json()


PROMPTS = Schema(
    {
        "id": "text",
        "prompt": "messages",
        "answer": "text",
        "info": "text",
        "task": "text",
        "tools": "text",
    }
)
"""The columns of an export of prompts."""

_ORIGIN: dict[str, Kind] = {
    "id": "text",
    "epoch": "int",
    "branch": "int",
    "task": "text",
    "model": "text",
    "log": "text",
    "sample_hash": "text",
}
"""Where a row of a log comes from."""

_SPOKEN: dict[Layout, dict[str, Kind]] = {
    "chat": {"messages": "messages", "tools": "text"},
    "trl": {"prompt": "json", "completion": "json", "tools": "text"},
    "verl": {"messages": "messages"},
    "tinker": {"messages": "messages", "tools": "text"},
}
"""Columns of ``sft`` and ``rejection``."""

_COMPARED: dict[Layout, dict[str, Kind]] = {
    "chat": {"prompt": "messages", "chosen": "messages", "rejected": "messages", "tools": "text"},
    "trl": {"prompt": "json", "chosen": "json", "rejected": "json", "tools": "text"},
    "tinker": {"comparison": "comparison", "label": "text", "tools": "text"},
}
"""Columns of ``preference``."""

_REWARDED: dict[Layout, dict[str, Kind]] = {
    "chat": {"messages": "messages", "tools": "text"},
    "trl": {"prompt": "json", "completion": "json", "label": "bool", "tools": "text"},
    "verifiers": {
        "prompt": "messages",
        "completion": "messages",
        "answer": "text",
        "info": "text",
        "tools": "text",
    },
    "tinker": {"messages": "messages", "tools": "text"},
}
"""Columns of ``rewards``, beside ``reward``."""

_FORMS: dict[Form, dict[Layout, dict[str, Kind]]] = {
    "sft": _SPOKEN,
    "rejection": _SPOKEN,
    "preference": _COMPARED,
    "rewards": _REWARDED,
}

_VERL_PROMPTS: dict[str, Kind] = {
    "data_source": "text",
    "prompt": "messages",
    "ability": "text",
    "reward_model": "verl_reward",
    "extra_info": "verl_info",
}


def prompt_schema(layout: Layout) -> Schema:
    """Return the columns of an export of prompts."""
    if layout == "verl":
        return Schema(_VERL_PROMPTS)
    columns = {**PROMPTS.columns, "prompt": "json"} if layout == "trl" else PROMPTS.columns
    return Schema(columns, flat_calls=layout == "verifiers")


def prompt_row(layout: Layout, row: Row, index: int) -> Row:
    """Lay out a prompt."""
    if layout == "verl":
        return {
            "data_source": row["task"],
            "prompt": row["prompt"],
            "ability": row["task"],
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"index": index, "id": row["id"], "info": row["info"]},
        }
    tools = row["tools"] if layout != "trl" else _tools(row["tools"])
    return {**row, "prompt": _laid_out(row["prompt"], layout), "tools": tools}


def log_schema(form: Form, layout: Layout) -> Schema:
    """Return the columns of an export of logs."""
    columns = _FORMS[form].get(layout)
    if columns is None:
        able = ", ".join(each for each in LAYOUTS if each in _FORMS[form])
        raise ConfigError(
            f"there is nothing in {layout} that reads --as {form}; layouts with it: {able}"
        )
    rewarded: dict[str, Kind] = {"scores": "text", "reward": "float"}
    if form == "preference":
        rewarded = {"rejected_epoch": "int", "reward": "float", "rejected_reward": "float"}
    marked = layout == "chat" or (layout == "tinker" and form != "preference")
    flat = layout == "verifiers"
    return Schema({**_ORIGIN, **columns, **rewarded}, flat_calls=flat, marked=marked)


def spoken_rows(
    layout: Layout, form: Form, talk: Conversation, further: Mapping[str, Any]
) -> Iterator[Row]:
    """Lay out one branch: one row, or several if the layout cannot mark the words to train on."""
    columns = _FORMS[form][layout]
    if "messages" in columns:
        yield _whole(layout, talk, further)
        return
    for start, end in _stretches(talk):
        yield {
            **further,
            "prompt": _laid_out(talk.messages[:start], layout),
            "completion": _laid_out(talk.messages[start:end], layout),
            "tools": _tools(talk.tools) if layout == "trl" else talk.tools,
        }


def compared_row(
    layout: Layout, chosen: Conversation, rejected: Conversation, further: Mapping[str, Any]
) -> Row:
    """Lay out a pair of branches that have the same prompt and the same tools."""
    start = chosen.prompt

    def part(talk: Conversation, begin: int, end: int | None = None) -> list[dict[str, Any]] | str:
        marks = talk.trained[begin:end] if layout == "chat" else None
        return _laid_out(talk.messages[begin:end], layout, marks=marks)

    parts = part(chosen, 0, start), part(chosen, start), part(rejected, start)
    if layout == "tinker":
        comparison = dict(zip(_COMPARED_PARTS, parts, strict=True))
        return {**further, "comparison": comparison, "label": "A", "tools": chosen.tools}
    return {
        **further,
        **dict(zip(("prompt", "chosen", "rejected"), parts, strict=True)),
        "tools": _tools(chosen.tools) if layout == "trl" else chosen.tools,
    }


def _whole(layout: Layout, talk: Conversation, further: Mapping[str, Any]) -> Row:
    if layout == "verl":
        said = [message["role"] == "assistant" for message in talk.messages]
        if list(talk.trained) != said:
            raise ExportError(
                "verl trains on every assistant message, and this conversation has some that are "
                "not to be trained on (examples, replies that were cut, or a branch's beginning "
                "that another row has); --layout chat and trl can tell them apart."
            )
        if talk.tools != "[]":
            raise ExportError(
                "verl reads tools as Arrow structs, in which each tool gets the others' "
                "parameters; --layout chat and trl keep them as they are."
            )
        return {**further, "messages": _laid_out(talk.messages, layout)}
    return {
        **further,
        "messages": _laid_out(talk.messages, layout, marks=talk.trained),
        "tools": talk.tools,
    }


def _stretches(talk: Conversation) -> Iterator[tuple[int, int]]:
    """Yield where completions begin and end in which all of the model's words are trained on."""
    start: int | None = None
    end = 0
    for place, message in enumerate(talk.messages):
        if talk.trained[place]:
            start = place if start is None else start
            end = place + 1
        elif message["role"] == "assistant" and start is not None:
            yield start, end
            start = None
    if start is not None:
        yield start, end


def _laid_out(
    messages: Sequence[Mapping[str, Any]],
    layout: Layout,
    *,
    marks: Sequence[bool] | None = None,
) -> list[dict[str, Any]] | str:
    """Return messages as a layout has them: TRL's as JSON, without keys that do not apply."""
    made = [dict(message) for message in messages]
    for message in made:
        if "tool_calls" in message:
            message["tool_calls"] = [_call(call, layout) for call in message["tool_calls"]]
    if marks is not None:
        for message, mark in zip(made, marks, strict=True):
            message["trainable"] = mark
    return json.dumps(made, ensure_ascii=False) if layout == "trl" else made


def _call(call: Mapping[str, Any], layout: Layout) -> Mapping[str, Any]:
    function = call["function"]
    if layout == "verifiers":
        return {"id": call["id"], "type": call["type"], **function}
    if layout == "trl":  # chat templates want arguments as objects
        arguments = json.loads(function["arguments"], parse_int=_integer)
        return {**call, "function": {**function, "arguments": arguments}}
    return call


def _integer(text: str) -> int:
    """Read an integer that ``datasets`` can read too: others would make its row a string."""
    number = int(text)
    if not -(2**63) <= number < 2**64:
        raise ExportError(
            f"a tool call has the argument {text:.30}, and trl's columns hold integers of 64 bits; "
            "--layout chat has arguments as text."
        )
    return number


def _tools(tools: str) -> str | None:
    """Return tools as TRL reads them: some templates mention tools even for an empty list."""
    return None if tools == "[]" else tools
