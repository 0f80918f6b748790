"""An eval of the provider `tinker` is as a rollout: prompts token for token, replies, scores."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import tinker
from inspect_ai import eval_async
from inspect_ai.log import read_eval_log_async
from inspect_ai.model import GenerateConfig, ModelOutput
from tests.parity.cases import ParityCase, load_corpus
from tests.parity.corpus.content import NO_IMAGES
from tests.tokens.test_messages import PatchCounter
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.renderers.qwen3 import Qwen3VLInstructRenderer

from inspect_tinker_plugin.contracts.episodes import TurnRequest
from inspect_tinker_plugin.evaluate import provider
from inspect_tinker_plugin.evaluate.provider import connected_model
from inspect_tinker_plugin.evaluate.source import Connection, Source, connect
from inspect_tinker_plugin.options import EpisodeOptions
from inspect_tinker_plugin.testing.policy import ScriptedPolicy, load_renderer, load_tokenizer
from inspect_tinker_plugin.testing.replies import Player, recording
from inspect_tinker_plugin.testing.sides import (
    Conditions,
    eval_arguments,
    make_runner,
    one_sample_task,
    roll_to_end,
    wait_for_run,
)
from inspect_tinker_plugin.testing.traces import (
    Trace,
    compare_traces,
    trace_of_log,
    trace_of_result,
)
from inspect_tinker_plugin.tokens.episode import DatasetRenderer, EpisodeTokens
from inspect_tinker_plugin.tokens.prompts import flatten
from tinker_local import LocalServer


@dataclass
class Played:
    """One side's run."""

    player: Player
    prompts: list[list[Any]] = field(default_factory=list)
    replies: list[list[int]] = field(default_factory=list)
    trace: Trace | None = None


class Sampler:
    """A sampling client that records: a script, or the client of a server."""

    def __init__(self, played: Played, renderer: Renderer, client: Any = None) -> None:
        self._played = played
        self._client = client
        script = played.player.script
        self.policy = ScriptedPolicy(renderer, script, request=lambda: played.player.requests[-1])

    async def sample(
        self,
        prompt: tinker.ModelInput,
        num_samples: int,
        sampling_params: tinker.SamplingParams,
        **asked: Any,
    ) -> tinker.SampleResponse:
        self._played.prompts.append(flatten(prompt.chunks))
        if self._client is not None:
            sampled = await self._client.sample(prompt, num_samples, sampling_params, **asked)
        else:
            said = await self.policy(prompt, cast(StopCondition, sampling_params.stop))
            sequence = tinker.SampledSequence(
                stop_reason=said.stop_reason, sequence_id="0", _tokens_list=said.tokens
            )
            sampled = tinker.SampleResponse(sequences=[sequence])
        self._played.replies += [list(each.tokens) for each in sampled.sequences]
        return cast(tinker.SampleResponse, sampled)


class Completer(TokenCompleter):
    """Samples for a rollout as the cookbook's completer does."""

    def __init__(self, sampler: Sampler, max_tokens: int) -> None:
        self._sampler = sampler
        self._max_tokens = max_tokens

    async def __call__(
        self,
        model_input: tinker.ModelInput,
        stop: StopCondition,
        *,
        max_tokens: int | None = None,
    ) -> TokensWithLogprobs:
        room = min(self._max_tokens, max_tokens or self._max_tokens)
        params = tinker.SamplingParams(stop=stop, max_tokens=room, temperature=0.0)
        [sequence] = (await self._sampler.sample(model_input, 1, params)).sequences
        return TokensWithLogprobs(
            tokens=list(sequence.tokens), maybe_logprobs=None, stop_reason=sequence.stop_reason
        )


def recording_tokens(player: Player, *, scripted: bool) -> type[EpisodeTokens]:
    class Recording(EpisodeTokens):
        def prompt(self, request: TurnRequest) -> Any:
            seen = [message.model_copy(deep=True) for message in request.messages]
            # A rollout's request has the sampler's options, which an eval's sampler has honoured.
            config = provider.without_sampler_options(request.config)
            player.requests.append(replace(request, messages=seen, config=config))
            return super().prompt(request)

        def parse(self, tokens: Any, *, stop_reason: Any, request: TurnRequest) -> ModelOutput:
            if scripted:  # whose replies are said whole, whatever their length
                config = request.config.model_copy(update={"max_tokens": None})
                request = replace(request, config=config)
            return super().parse(tokens, stop_reason=stop_reason, request=request)

    return Recording


async def evaluate(
    case: ParityCase,
    renderer: Renderer,
    *,
    options: EpisodeOptions,
    max_tokens: int = 100_000,
    client: Any = None,
    window: int | None = None,
) -> Played:
    """Run a case under `inspect eval` with the provider."""
    played = Played(Player(case.script))
    sampler = Sampler(played, renderer, client)
    tokens = recording_tokens(played.player, scripted=client is None)
    with recording() as others, patch.object(provider, "EpisodeTokens", tokens):
        task = one_sample_task(case.task, 0)
        source = Source(base_model="rl/policy", max_tokens=max_tokens, temperature=0.0)
        connection = Connection(
            source=source, sampler=cast(Any, sampler), renderer=renderer, window=window
        )
        model = connected_model(connection, GenerateConfig())
        with tempfile.TemporaryDirectory() as log_dir:
            work = eval_async(
                task,
                model=model,
                epochs=1,
                log_dir=log_dir,
                log_realtime=False,
                fail_on_error=False,
                **eval_arguments(options),
            )
            [written] = await wait_for_run(work, 300, played.player)
            log = await read_eval_log_async(written.location, resolve_attachments="full")
    played.player.refusals = int(sampler.policy.exhausted)
    assert log.samples, log.error
    played.trace = trace_of_log(
        log.samples[0], policy=played.player, others=others, ordered=case.ordered
    )
    return played


async def roll_out(
    case: ParityCase,
    renderer: Renderer,
    *,
    options: EpisodeOptions,
    max_tokens: int = 100_000,
    client: Any = None,
    window: int | None = None,
) -> Played:
    """Run a case as a rollout."""
    played = Played(Player(case.script))
    sampler = Sampler(played, renderer, client)
    with recording() as others:
        task = one_sample_task(case.task, 0)
        runner = make_runner(task, Conditions(options=options), keep_log=True)
        episode = runner.episode(task.dataset[0])
        runner.count_tokens = DatasetRenderer(renderer).count_tokens
        tokens = recording_tokens(played.player, scripted=client is None)(
            DatasetRenderer(renderer),
            task=episode.prepared.name,
            sample_id=episode.sample.id,
            context_window=window,
        )

        policy = Completer(sampler, max_tokens)
        result = await wait_for_run(roll_to_end(episode, tokens, policy), 300, played.player)
        played.player.refusals = int(sampler.policy.exhausted)
        played.trace = trace_of_result(
            result, policy=played.player, others=others, ordered=case.ordered
        )
    return played


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
        if case.expect.limit != "time"  # a busy server might take longer than that
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
