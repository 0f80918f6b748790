"""An eval of the provider `tinker` is as a rollout: prompts token for token, replies, scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.evaluate.sides import evaluate, roll_out
from tests.parity.cases import ParityCase, load_corpus
from tests.parity.corpus.content import NO_IMAGES
from tests.tokens.test_messages import PatchCounter
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.renderers.qwen3 import Qwen3VLInstructRenderer

from inspect_tinker_plugin.evaluate.source import Source, connect
from inspect_tinker_plugin.testing.policy import load_renderer, load_tokenizer
from inspect_tinker_plugin.testing.traces import compare_traces
from tinker_local import LocalServer

CASES = {each.id: each for each in load_corpus(Path(__file__).parents[1] / "parity" / "corpus")}

SELECTED = (
    "few-shot-messages-in-the-input",
    "self-critique-by-the-policy",
    "react-with-tool",
    "handoff-to-a-sub-agent",
    "parallel-tool-calls",
    "malformed-tool-arguments",
    "message-limit-of-the-task",
    "reasoning-content",
    "list-of-scorers",
)
"""Cases that every change is tested with."""

EVERY_RENDERER = "react-with-tool"
"""The case that every change is tested with under every renderer."""

RENDERERS = ("qwen3", "qwen3_5", "kimi_k2", "nemotron3")
"""Further renderers: with and without earlier reasoning, and with other formats of tools."""


REFUSED = "generate-options-of-task-and-solver"
"""The case whose options the provider refuses by name (test_provider.py)."""


def cases() -> list[Any]:
    found = []
    for case in CASES.values():
        if case.tokens is None and case.ordered and case.id != REFUSED:
            marks = [pytest.mark.docker] if case.docker else []
            marks += [] if case.id in SELECTED else [pytest.mark.nightly]
            found.append(pytest.param(case, case.renderer, id=case.id, marks=marks))
    return found + with_renderers(SELECTED, usual=EVERY_RENDERER)


def with_renderers(names: tuple[str, ...], usual: str | None = None) -> list[Any]:
    """The cases with each further renderer; per change, the usual one shows each renderer."""
    return [
        pytest.param(
            CASES[name],
            renderer,
            id=f"{name}-{renderer}",
            marks=[] if name == usual else [pytest.mark.nightly],
        )
        for renderer in RENDERERS
        for name in names
    ]


async def assert_alike(case: ParityCase, renderer: str | Renderer, **how: Any) -> None:
    made = load_renderer(renderer) if isinstance(renderer, str) else renderer
    expected = await roll_out(case, made, **how)
    found = await evaluate(case, made, **how)
    assert found.prompts == expected.prompts
    assert found.replies == expected.replies
    assert expected.trace is not None
    assert found.trace is not None
    assert [str(each) for each in compare_traces(found.trace, expected.trace)] == []


@pytest.mark.parametrize(("case", "renderer"), cases())
async def test_an_eval_is_as_a_rollout_of_the_same_replies(case: ParityCase, renderer: str) -> None:
    await assert_alike(case, renderer, options=case.options)


@pytest.mark.parametrize(
    "case", [pytest.param(each, id=each.id) for each in CASES.values() if each.tokens == NO_IMAGES]
)
async def test_images_are_in_prompts_where_the_renderer_has_them(case: ParityCase) -> None:
    vision = Qwen3VLInstructRenderer(load_tokenizer(), image_processor=PatchCounter())
    await assert_alike(case, vision, options=case.options)


SERVED = ("few-shot-messages-in-the-input", "react-with-tool")
"""Cases that say enough when a model without a script answers them."""

WARM = ("two-generate-calls", "solver-that-calls-get-model")
"""Cases whose calls ask for a temperature: an eval has it, a rollout has its sampler's."""


def served() -> list[Any]:
    found = [
        pytest.param(
            case,
            "qwen3_instruct",
            id=case.id,
            marks=[] if case.id in SERVED else [pytest.mark.nightly],
        )
        for case in CASES.values()
        if case.tokens is None and case.ordered and not case.docker
        if case.id not in (REFUSED, *WARM)
    ]
    return found + with_renderers(SERVED)


@pytest.mark.local
@pytest.mark.slow
@pytest.mark.parametrize(("case", "renderer"), served())
async def test_an_eval_is_as_a_rollout_of_the_same_weights(
    case: ParityCase, renderer: str, server: LocalServer, tiny_model: Path
) -> None:
    """Both sample at temperature 0; the random model never ends its turn by itself."""
    source = Source(base_model=str(tiny_model), renderer=renderer, base_url=server.url)
    connected = connect(source, api_key=None).result()
    limit = min(case.options.message_limit or 9, 9)
    await assert_alike(
        case,
        renderer,
        options=replace(case.options, message_limit=limit),
        max_tokens=16,
        client=connected.sampler,
        window=connected.window,
    )
