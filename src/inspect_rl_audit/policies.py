"""Scripted policies: what one plays in an episode, and the ways in which it answers."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput
from inspect_ai.solver import TaskState
from inspect_ai.tool import ToolInfo

from inspect_rl_audit.records import Key, PolicyKind
from inspect_tinker_plugin import TurnRequest
from inspect_tinker_plugin.tasks import choice_name, choice_texts, targets

Notes = dict[str, Any]
"""Notes of one episode's policy and moves, as JSON."""

PolicyReply = Callable[[TurnRequest, Notes], ModelOutput | None]
"""Answers a model call; ``None`` when the policy has nothing more to say."""

Move = Callable[[TaskState, Notes], Awaitable[None]]
"""An attacker's action inside the episode, before the solver starts or after it has ended."""


@dataclass(frozen=True, kw_only=True)
class Play:
    """One episode to run: a sample, and the policy that plays it."""

    policy: str
    """Name of the policy; together with the sample it determines what is played."""

    sample: Sample
    reply: PolicyReply
    kind: PolicyKind = "other"

    repeat: int = 1
    """Number among identical plays."""

    before: Move | None = None
    """Runs in the episode before the task's solver, after its set-up."""

    after: Move | None = None
    """Runs in the episode after the task's solver, before its scorers."""

    delay: float = 0.0
    """Seconds that the policy takes for each reply."""

    @property
    def key(self) -> Key:
        """Key of its episode within an audit."""
        assert self.sample.id is not None
        return self.policy, self.sample.id, self.repeat


def shown(request: TurnRequest) -> str:
    """Return everything that the model reads at a call, as text: messages and tools."""
    parts = [message.text for message in request.messages]
    parts += [f"{tool.name}: {tool.description}" for tool in request.tools]
    return "\n".join(parts)


NULL = "unknowing"
"""Name of the honest policy that has no answer."""

UNKNOWING = "I do not know."
"""The reply of an honest policy without an answer: the baseline for everything else."""

FORMS: Mapping[str, Callable[[str], str]] = {
    "ANSWER": lambda text: f"ANSWER: {text}",
    "bare": lambda text: text,
    "sentence": lambda text: f"The answer is {text}",
    "Answer": lambda text: f"Answer: {text}",
    "boxed": lambda text: f"\\boxed{{{text}}}",
    "hashes": lambda text: f"#### {text}",
    "tag": lambda text: f"<answer>{text}</answer>",
    "final": lambda text: f"FINAL ANSWER: {text}",
    "code": lambda text: f"```python\n{text}\n```",
    "json": lambda text: json.dumps({"answer": text}),
    "solution": lambda text: f"<solution>{text}</solution>",
}
"""Ways to write an answer, the most usual first."""

_SUBMIT = re.compile(r"submit|final_?answer|^answer$|^finish$|^done$", re.IGNORECASE)
_SHOWN_CHOICE = re.compile(r"^\s*[(\[]?([A-Za-z])[)\].:]\s+(.+?)\s*$", re.MULTILINE)


def submit_tool(tools: Sequence[ToolInfo]) -> tuple[str, str] | None:
    """Return the tool that takes the answer, with the name of its parameter."""
    for tool in tools:
        texts = [n for n, p in tool.parameters.properties.items() if p.type in ("string", None)]
        if _SUBMIT.search(tool.name) and len(texts) == 1:
            return tool.name, texts[0]
    return None


def use_tool(name: str, arguments: dict[str, Any]) -> ModelOutput:
    """Call a tool, and say nothing beside the call."""
    return ModelOutput.for_tool_call("scripted", name, arguments, content="")


def always(text: str | Callable[[TurnRequest], str]) -> PolicyReply:
    """Give one answer, through the tool that takes answers if there is one.

    It is repeated if asked again, until the solver seems to loop.
    """

    def reply(request: TurnRequest, notes: Notes) -> ModelOutput | None:
        said = notes.setdefault("said", 0)
        if said >= 4:
            return None
        notes["said"] = said + 1
        answer = text if isinstance(text, str) else text(request)
        taker = submit_tool(request.tools)
        if taker is None:
            return ModelOutput.from_content("scripted", answer)
        return use_tool(taker[0], {taker[1]: answer})

    return reply


def to_all(reply: PolicyReply) -> Callable[[Sample], PolicyReply]:
    """Reply to every sample in the same way."""
    return lambda sample: reply


def letters_of(sample: Sample) -> list[str]:
    """Return the letters of the right choices, as the dataset has them."""
    choices = sample.choices or []
    right = choice_texts(sample) or []
    return [choice_name(choices.index(text)) for text in right if text in choices]


def letter_of(choice: str, choices: Sequence[str], request: TurnRequest) -> str:
    """Return the letter that the prompt gives a choice, or that its position has; "" if none."""
    known = {text.strip(): letter.upper() for letter, text in _SHOWN_CHOICE.findall(shown(request))}
    usual = choice_name(choices.index(choice)) if choice in choices else ""
    return str(known.get(choice.strip(), usual))


def right_answer(sample: Sample, request: TurnRequest, gold: str | None = None) -> str:
    """Return the right answer as this prompt wants it: letters if choices have letters."""
    if gold is not None:
        return gold
    choices = sample.choices or []
    texts = choice_texts(sample) if choices else None
    if texts:
        letters = [letter_of(text, choices, request) for text in texts]
        return ",".join(letters) if all(letters) else ", ".join(texts)
    wanted = targets(sample)
    return wanted[0] if wanted else ""


def gold_reply(sample: Sample, form: str, gold: str | None = None) -> PolicyReply:
    """Give the right answer in one of the `FORMS`."""
    write = FORMS[form]
    return always(lambda request: write(right_answer(sample, request, gold)))


def made_up(tool: ToolInfo) -> dict[str, Any]:
    """Make up arguments that a tool's schema allows, without regard to their meaning."""
    wanted = tool.parameters.required or list(tool.parameters.properties)
    return {name: _value(tool.parameters.properties[name]) for name in wanted}


def _value(schema: Any) -> Any:
    if schema.enum:
        return schema.enum[0]
    if schema.default is not None:
        return schema.default
    if schema.anyOf:
        return _value(schema.anyOf[0])
    simple = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}, "null": None}
    return simple.get(schema.type, "answer")


def holds(text: str, part: str) -> bool:
    """Whether a text contains another one, with word borders around it, in any case."""
    pattern = rf"(?<!\w){re.escape(part.strip())}(?!\w)"
    return bool(part.strip()) and re.search(pattern, text, re.IGNORECASE) is not None
