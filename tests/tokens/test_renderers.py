"""Which renderers of the cookbook keep an episode in one sequence; docs/renderers.md says so.

``python -m tests.tokens.test_renderers`` writes the table anew.
"""

from __future__ import annotations

import inspect
import re
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest
from inspect_ai.model import ChatMessage, ChatMessageUser
from tests.tokens.conversations import Rollout
from tests.tokens.formats import DEEPSEEK, GLM, LLAMA3, tokenizer
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer

from inspect_tinker_plugin.tokens.dataset_renderer import DatasetRenderer

PAGE = Path(__file__).parents[2] / "docs" / "renderers.md"
BEGIN, END = "<!-- begin: generated -->\n", "<!-- end: generated -->\n"
LOCK = (PAGE.parents[1] / "constraints.txt").read_text(encoding="utf-8")
LOCKED = re.findall(r"(?m)^tinker-cookbook==(\S+)", LOCK)[0]
"""The release that the page is of."""
HARMONY = ["return", "call", "start", "message", "channel", "end", "constrain"]
REASONS_UNASKED = {"qwen3", "qwen3_vl"}
NAMES = re.findall(r'name == "([^"]+)"', inspect.getsource(get_renderer))


def keeping_alternative(name: str) -> str | None:
    """Return the renderer of the same model that keeps earlier reasoning, if there is one."""
    stem = name
    while stem:
        if (other := f"{stem}_preserve_thinking") in NAMES and other != name:
            return other
        stem = stem.rpartition("_")[0]
    return None


def made(name: str) -> Renderer | None:
    """Make a renderer on the shipped tokenizer; ``None`` when it needs one that is not here."""
    special = [*LLAMA3, *DEEPSEEK, *GLM, *(f"<|{token}|>" for token in HARMONY)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if name == "tml_v0":
                return get_renderer(name, get_tokenizer("thinkingmachines/Inkling"))
            return get_renderer(name, tokenizer(*special))
        except (AssertionError, TypeError):
            return None


def datums(name: str, renderer: Renderer) -> int:
    """Play a dialogue of four turns, with reasoning where the format opens it."""
    rollout = Rollout(DatasetRenderer(renderer))
    messages: list[ChatMessage] = [ChatMessageUser(content="Hello.")]
    for turn in range(4):
        thought = f"hm {turn}\n</think>\n\n"
        if not rollout.context.parser.opens_thinking:
            thought = f"<think>\n{thought}" if name in REASONS_UNASKED else ""
        text = f"{thought}Reply {turn}."
        output = rollout.turn(messages, text)
        messages += [output.message, ChatMessageUser(content=f"And {turn}?")]
    return len(rollout.data())


def table() -> str:
    """Return the table of the page."""
    rows = [
        "| renderer | four turns are | instead | a control token in a text is |",
        "| --- | --- | --- | --- |",
    ]
    for name in NAMES:
        renderer = made(name)
        if renderer is None:
            rows.append(f"| `{name}` | (needs a tokenizer of its own; not tried) | | |")
            continue
        count = datums(name, renderer)
        other = keeping_alternative(name) if count > 1 else None
        result = "1 sequence" if count == 1 else f"{count} sequences"
        as_text = DatasetRenderer(renderer).control.encoded_as_text
        kept = "encoded as text" if as_text else "written with a space"
        rows.append(f"| `{name}` | {result} | {f'`{other}`' if other else ''} | {kept} |")
    return "\n".join(rows) + "\n"


@pytest.mark.slow
def test_the_page_has_every_renderer_as_it_is() -> None:
    written = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    if version("tinker-cookbook") == LOCKED:
        assert written == table()
        return
    here = table().splitlines()  # another release may have others beside those of the page
    assert [
        row for row in written.splitlines() if row not in here and row.split("`")[1] in NAMES
    ] == []


@pytest.mark.parametrize("name", ["nemotron3", "nemotron3_ultra"])
def test_preserved_thinking_keeps_an_episode_in_one_sequence(name: str) -> None:
    stripping, keeping = made(name), made(f"{name}_preserve_thinking")
    assert stripping is not None
    assert keeping is not None
    assert datums(name, stripping) == 4
    assert datums(name, keeping) == 1


def test_a_renderer_that_splits_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    renderer = made("nemotron3")
    assert renderer is not None
    context = DatasetRenderer(renderer)
    for _ in range(2):
        context.warn_of_splits("math")
    assert caplog.text.count("a training sequence of its own") == 1


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + table() + END + after, encoding="utf-8")
