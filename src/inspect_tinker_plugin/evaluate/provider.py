"""Inspect's model provider ``tinker``: answers as the policy of a rollout does, token for token.

Each sample has the token tree of an episode, so that a prompt continues the sampled tokens; each
model call renders, samples and parses with the code that a rollout uses.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count, takewhile
from logging import getLogger
from typing import Any
from weakref import WeakKeyDictionary

import tinker
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    GenerateConfig,
    Logprob,
    Logprobs,
    Model,
    ModelAPI,
    ModelCall,
    ModelOutput,
    ModelUsage,
    RetryDecision,
    TopLogprob,
    modelapi,
)
from inspect_ai.tool import ToolChoice, ToolInfo
from rich.markup import escape

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.episodes import TurnRequest
from inspect_tinker_plugin.contracts.errors import ConfigError, EpisodeError, InspectRLError
from inspect_tinker_plugin.episode.model import RequestRefusedError, window_name
from inspect_tinker_plugin.evaluate.overlap import Ids, read_trained, watch_evals
from inspect_tinker_plugin.evaluate.source import (
    Connection,
    Source,
    connect,
    find_obstacle,
    find_source,
    split_step,
)
from inspect_tinker_plugin.rl.models import require_renderer
from inspect_tinker_plugin.tokens.dataset_renderer import SAMPLER_OPTIONS
from inspect_tinker_plugin.tokens.episode import DatasetRenderer, EpisodeTokens, OverWindowError
from inspect_tinker_plugin.tokens.message_keys import MessageKey, message_key

logger = getLogger(__name__)

HONOURED = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "num_choices",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "stop_seqs",
        "max_tokens",
        "reasoning_effort",
    }
)
"""Generation options that this provider carries out."""

RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0, sys.float_info.max),
    "top_p": (0, 1),
    "top_k": (-1, math.inf),
    "num_choices": (1, math.inf),
    "max_tokens": (1, math.inf),
}
"""Least and greatest values of options; servers differ in what they make of others."""

OF_INSPECT = frozenset(
    {
        "max_retries",
        "timeout",
        "attempt_timeout",
        "stream_idle_timeout",
        "max_connections",
        "adaptive_connections",
        "system_message",
        "max_tool_output",
        "cache",
        "cache_prompt",
        "reasoning_history",
        "fail_on_refusal",
        "internal_tools",
        "parallel_tool_calls",
    }
)
"""Options that Inspect carries out itself, or that concern features that no model here has."""

_MOST_CONVERSATIONS = 1_000
"""Conversations outside of samples whose tokens are kept."""

_MOST_TOKENS = 20_000_000
"""Tokens of these that are kept, about a gigabyte; each turn counts as 1,000 beside its
conversation's prompt."""


class TinkerAPI(ModelAPI):
    """A model on a Tinker API server.

    Args:
        model_name: A checkpoint, a base model, or a run's folder (see :func:`find_source`).
        base_url: Address of the server, if not the run's own or the Tinker service.
        api_key: Key for the server, if it is not in ``TINKER_API_KEY``.
        config: Generation options of the model.
        renderer: Name of the renderer, if not that of the training or the recommended one.
        tokenizer: Name or folder of the tokenizer, if not the base model's.
        context_window: Tokens that the model takes, if the server does not say it.
        connection: A connection that is there already.
        others: Model arguments that this provider does not have.

    Raises:
        PrerequisiteError: There is no key, no such renderer or step, or an option is refused.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 - Inspect's own signature
        *,
        renderer: str | None = None,
        tokenizer: str | None = None,
        context_window: int | None = None,
        connection: Connection | None = None,
        **others: object,
    ) -> None:
        super().__init__(model_name, base_url, api_key, ["TINKER_API_KEY"], config)
        self._connection = connection
        try:
            if unknown := _find_refused(config):
                raise ConfigError(_refusal(unknown))
            if renderer is not None:
                require_renderer(renderer)
            given = {"renderer": renderer, "tokenizer": tokenizer, "context_window": context_window}
            if others:
                raise ConfigError(
                    f"the provider tinker has no model argument {', '.join(others)}; those it has "
                    f"are {', '.join(given)}"
                )
            if context_window is not None and not (
                isinstance(context_window, int) and context_window > 0
            ):
                raise ConfigError(f"context_window is a number of tokens, not {context_window!r}")
            self.source = (
                connection.source
                if connection is not None
                else _with(find_source(model_name, base_url=base_url, has_key=bool(api_key)), given)
            )
            if self.source.local and (problem := find_obstacle(self.source)):
                raise ConfigError(f"tinker/{model_name}: {problem}")
        except ConfigError as error:
            raise internals.PrerequisiteError(escape(str(error))) from error
        watch_evals()
        if connection is None and self.source.step is not None:
            # what Inspect's cache and logs know the weights by: a run may get newer ones
            self.model_name = f"{split_step(model_name)[0]}@{self.source.step}"
        self._context: DatasetRenderer | None = None
        self._trees: WeakKeyDictionary[Any, EpisodeTokens] = WeakKeyDictionary()
        self._indices = count()
        self._outside: dict[tuple[MessageKey, ...], EpisodeTokens] = {}

    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput | tuple[ModelOutput | Exception, ModelCall]:
        """Render the conversation, sample, and parse what was sampled.

        Raises:
            ConfigError: The model cannot be reached, an option cannot be honoured, or the renderer
                cannot carry a message or the tools.
            RequestRefusedError: A program asked for what the renderer cannot carry.
            InspectRLError: The SDK failed otherwise than by an error of its own.
        """
        connection = await self._connect()
        context = self._renderer(connection)
        dialect = internals.bridge_dialect()
        self._check(config, context, dialect)
        tokens = self._tokens(context, connection, input)
        requests = [
            TurnRequest(
                index=next(self._indices),
                messages=input,
                tools=tools,
                tool_choice=tool_choice,
                config=without_sampler_options(config),
                dialect=dialect,
            )
            for _ in range(config.num_choices or 1)
        ]
        try:
            stop = tokens.stop_condition(requests[0])
            prompts = [tokens.prompt(request) for request in requests]
        except OverWindowError as error:
            if dialect is not None and internals.current_sample() is None:
                # a client that is served would take the notice for words of the model
                raise ConfigError(str(error)) from error
            return error.answer
        except EpisodeError as error:
            if dialect is None or not tokens.turns:
                raise
            tokens.refuse(error)
            raise RequestRefusedError(error) from error
        params = _sampling(config, connection, prompts[0].length, stop)
        try:
            sampled = await connection.sampler.sample(
                prompts[0],
                len(requests),
                params,
                include_prompt_logprobs=config.prompt_logprobs is not None,
                topk_prompt_logprobs=_alternatives(config),
                topk_sample_logprobs=config.top_logprobs or 0,
            )
        except tinker.TinkerError:
            raise
        except Exception as error:  # the boundary of the SDK: no error of the request
            raise InspectRLError(f"sampling failed: {type(error).__name__}: {error}") from error
        outputs = [
            tokens.parse(sequence.tokens, stop_reason=sequence.stop_reason, request=request)
            for sequence, request in zip(sampled.sequences, requests, strict=True)
        ]
        words = _Words(context, config)
        choices = [
            words.add(output.choices[0], sequence, prompts[0], sampled)
            for output, sequence in zip(outputs, sampled.sequences, strict=True)
        ]
        output = ModelOutput(
            model=connection.source.name,
            choices=choices,
            completion=outputs[0].completion,
            usage=_usage(outputs, sampled),
            input_context_tokens=prompts[0].length,
        )
        return output, _call(prompts[0], params, sampled)

    @cached_property
    def trained_on(self) -> Ids:
        """Samples that the model was trained on, as far as its run says it."""
        if self.source.run is None:
            return {}
        try:
            return read_trained(self.source.run, self.source.step)
        except ConfigError as error:
            logger.warning(
                "%s; so it is not known either which samples of an eval it has seen", error
            )
            return {}

    async def _connect(self) -> Connection:
        if self._connection is None:
            connecting = connect(self.source, api_key=self.api_key)
            self._connection = await asyncio.shield(asyncio.wrap_future(connecting))
        return self._connection

    def _renderer(self, connection: Connection) -> DatasetRenderer:
        if self._context is None:
            self._context = DatasetRenderer(connection.renderer, model=connection.source.name)
        return self._context

    def _tokens(
        self, context: DatasetRenderer, connection: Connection, messages: Sequence[ChatMessage]
    ) -> EpisodeTokens:
        """Return the token tree of the running sample, or of conversations that begin alike."""
        sample = internals.current_sample()
        if sample is not None:
            if sample not in self._trees:
                self._trees[sample] = EpisodeTokens(
                    context,
                    task=sample.task,
                    sample_id=sample.sample.id,
                    epoch=sample.epoch,
                    context_window=connection.window,
                )
            return self._trees[sample]
        opening = takewhile(lambda message: message.role != "assistant", messages)
        asked = tuple(message_key(message) for message in opening if message.role == "user")
        tree = self._outside.pop(asked, None)
        if tree is None:
            tree = EpisodeTokens(
                context,
                task="(outside of samples)",
                sample_id=None,
                context_window=connection.window,
            )
        self._outside[asked] = tree  # the newest come last
        trees = self._outside
        while len(trees) > _MOST_CONVERSATIONS or sum(map(_size, trees.values())) > _MOST_TOKENS:
            del trees[next(iter(trees))]
        return tree

    def _check(self, config: GenerateConfig, context: DatasetRenderer, dialect: str | None) -> None:
        """Refuse options that cannot be honoured; those of a sample's program are reported."""
        refused = _find_refused(config)
        effort = config.reasoning_effort
        if effort is not None and context.effort(effort) is None:
            refused.append("reasoning_effort")
        if not refused:
            return
        if dialect is None or internals.current_sample() is None:
            raise ConfigError(_refusal(refused))
        context.warn_once(f"options:{refused}", f"{_refusal(refused)} A program asked for it.")

    async def count_text_tokens(self, text: str) -> int:
        """Count with the model's own tokenizer."""
        return self._renderer(await self._connect()).count_tokens(text)

    def input_tokens_name(self) -> str:
        """Return the name that Inspect finds the context window by: compaction is a part of it.

        The server says how long it is, and is waited for: compaction asks before the first call.
        """
        window = self.source.context_window
        if window is None:
            connection = self._connection or connect(self.source, api_key=self.api_key).result()
            window = connection.window
        return super().input_tokens_name() if window is None else window_name(window)

    async def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text, without any template."""
        context = self._renderer(await self._connect())
        tokens: list[int] = context.tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def connection_key(self) -> str:
        """One pool of connections per server and key."""
        server = self.source.run if self.source.local else self.source.base_url
        return f"{server}:{self.initial_api_key}"

    def max_connections(self) -> int:
        """As many as Inspect's adaptive connections reach: the server makes batches of them."""
        return 100

    def should_retry(self, ex: Exception) -> bool | RetryDecision:
        """Retry what the SDK has given up to retry and may be over."""
        if isinstance(ex, tinker.RateLimitError):
            return RetryDecision.rate_limit()
        return isinstance(ex, tinker.APIConnectionError | tinker.InternalServerError)

    def is_auth_failure(self, ex: Exception) -> bool:
        """Whether the server refused the key."""
        return isinstance(ex, tinker.AuthenticationError)


def _size(tree: EpisodeTokens) -> int:
    """Estimate the tokens that a tree holds: turns of a conversation share its prompt."""
    return 1_000 * (1 + len(tree.turns)) + (tree.turns[-1].length if tree.turns else 0)


@modelapi(name="tinker")
def _tinker_provider() -> type[ModelAPI]:
    return TinkerAPI


def connected_model(connection: Connection, config: GenerateConfig) -> Model:
    """Make a model of the provider over a connection that is there already."""
    make: Callable[..., ModelAPI] = _tinker_provider
    source = connection.source
    name = f"{source.run}@{source.step}" if source.step else source.name
    api = make(name, config=config, connection=connection)
    return Model(api, config)


def _with(source: Source, given: dict[str, Any]) -> Source:
    return replace(source, **{name: value for name, value in given.items() if value is not None})


def _find_refused(config: GenerateConfig) -> list[str]:
    """Return the options that cannot be honoured, or not with their value."""
    unknown = [
        name
        for name, value in config
        if value not in (None, False) and name not in HONOURED | OF_INSPECT
    ]
    values = {name: getattr(config, name) for name in RANGES}
    return unknown + [
        f"{name}={value}"
        for name, value in values.items()
        if value is not None
        and not (isinstance(value, int | float) and RANGES[name][0] <= value <= RANGES[name][1])
    ]


def _refusal(names: Sequence[str]) -> str:
    return f"the provider tinker cannot honour {', '.join(names)}: leave out what is not supported."


def without_sampler_options(config: GenerateConfig) -> GenerateConfig:
    """Return the options without those that the sampler has honoured."""
    sampled = {*SAMPLER_OPTIONS, "num_choices", "prompt_logprobs"} - {"reasoning_effort"}
    return config.model_copy(update=dict.fromkeys(sampled & set(GenerateConfig.model_fields)))


def _sampling(
    config: GenerateConfig, connection: Connection, length: int, stop: list[str] | list[int]
) -> tinker.SamplingParams:
    source = connection.source
    room = source.max_tokens if config.max_tokens is None else config.max_tokens
    if connection.window is not None:
        room = min(room, connection.window - length)
    return tinker.SamplingParams(
        max_tokens=room,
        seed=config.seed,
        stop=stop,
        temperature=source.temperature if config.temperature is None else config.temperature,
        top_k=-1 if config.top_k is None else config.top_k,
        top_p=1.0 if config.top_p is None else config.top_p,
    )


def _alternatives(config: GenerateConfig) -> int:
    """Return how many alternatives a call asks for at each token of its prompt."""
    count = config.prompt_logprobs or 0
    return count if count > 1 else 0


def _usage(outputs: Sequence[ModelOutput], sampled: tinker.SampleResponse) -> ModelUsage:
    """Count the prompt once, as far as the server had not read it, and every reply."""
    usages = [output.usage or ModelUsage() for output in outputs]
    cached, said = sampled.prompt_cache_hit_tokens, sum(usage.output_tokens for usage in usages)
    return ModelUsage(
        input_tokens=usages[0].input_tokens - cached,
        input_tokens_cache_read=cached,
        output_tokens=said,
        total_tokens=usages[0].input_tokens + said,
    )


def _call(
    prompt: tinker.ModelInput, params: tinker.SamplingParams, sampled: tinker.SampleResponse
) -> ModelCall:
    """Record the exact tokens, for logs with ``--log-model-api``."""
    return ModelCall.create(
        {
            "prompt": [_record_chunk(chunk) for chunk in prompt.chunks],
            "sampling_params": params.model_dump(),
        },
        {
            "sequences": [
                {"tokens": list(each.tokens), "stop_reason": each.stop_reason}
                for each in sampled.sequences
            ]
        },
    )


def _record_chunk(chunk: tinker.ModelInputChunk) -> list[int] | str:
    if isinstance(chunk, tinker.EncodedTextChunk):
        return list(chunk.tokens)
    return f"{chunk.type}, length {chunk.length}"


class _Words:
    """Adds to choices the log-probabilities that a call asks for."""

    def __init__(self, context: DatasetRenderer, config: GenerateConfig) -> None:
        self._tokenizer = context.tokenizer
        self._config = config

    def add(
        self,
        choice: ChatCompletionChoice,
        sequence: tinker.SampledSequence,
        prompt: tinker.ModelInput,
        sampled: tinker.SampleResponse,
    ) -> ChatCompletionChoice:
        if self._config.logprobs or self._config.top_logprobs:
            tops = sequence.topk_logprobs if self._config.top_logprobs else None
            choice.logprobs = self._logprobs(
                "logprobs",
                list(sequence.tokens),
                sequence.logprobs,
                tops,
                self._config.top_logprobs,
            )
        if (count := self._config.prompt_logprobs) is not None:
            read: list[int | None] = []
            for chunk in prompt.chunks:
                if isinstance(chunk, tinker.EncodedTextChunk):
                    read += chunk.tokens
                else:
                    read += [None] * chunk.length
            tops = sampled.topk_prompt_logprobs if count > 1 else None
            choice.prompt_logprobs = self._logprobs(
                "prompt_logprobs", read, sampled.prompt_logprobs, tops, _alternatives(self._config)
            )
        return choice

    def _logprobs(
        self,
        name: str,
        tokens: Sequence[int | None],
        values: Sequence[float | None] | None,
        tops: Sequence[Sequence[tuple[int, float]] | None] | None,
        count: int | None,
    ) -> Logprobs:
        """Return the log-probabilities of tokens, without those that have none: a prompt's first.

        Raises:
            ConfigError: The server has not sent them.
        """
        if values is None or (count and tops is None):
            raise ConfigError(
                f"the server does not honour {name if values is None else 'top_' + name}"
            )
        content = []
        for place, (token, value) in enumerate(zip(tokens, values, strict=True)):
            if token is None or value is None:
                continue
            others = (tops[place] if tops is not None else None) or ()
            content.append(
                Logprob(
                    **self._word(token, value),
                    top_logprobs=[TopLogprob(**self._word(*each)) for each in others],
                )
            )
        return Logprobs(content=content)

    def _word(self, token: int, value: float) -> dict[str, Any]:
        text = str(self._tokenizer.decode([token]))
        return {"token": text, "logprob": value, "bytes": list(text.encode())}
