"""The tokens of an episode: each prompt continues the one before, sampled tokens included.

::

    context = RenderContext(renderer)                   # one per dataset
    context.check_tools(tools)
    cache = PromptCache()                               # one per group
    episode = EpisodeTokens(context, task="math", sample_id=7, shared_prompts=cache)
    prompt = episode.prompt(request)                    # a TurnRequest
    stop = episode.stop_condition(request)
    output = episode.parse(sampled, stop_reason="stop", request=request)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import tinker
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    GenerateConfig,
    ModelOutput,
    ModelUsage,
    StopReason,
)
from inspect_ai.tool import ToolCall, ToolInfo
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.tokenizer_utils import Tokenizer

from inspect_tinker_plugin.episode.types import Metrics, TurnRequest
from inspect_tinker_plugin.errors import Cause, EpisodeError, RendererError
from inspect_tinker_plugin.rl.extension import Extension, Tail, flatten, merged
from inspect_tinker_plugin.rl.messages import conversation_prefix, renderer_message
from inspect_tinker_plugin.rl.parse import ReplyParser
from inspect_tinker_plugin.rl.prompt_cache import PromptCache, prompt_key
from inspect_tinker_plugin.rl.turns import (
    Match,
    MessageKey,
    Turn,
    Turns,
    frozen,
    message_key,
    tools_key,
)

logger = logging.getLogger(__name__)

# Options that the trainer's sampler decides about; an Env only hands out a stop condition.
_SAMPLER_OPTIONS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "logprobs",
    "top_logprobs",
    "reasoning_effort",
    "reasoning_tokens",
    "response_schema",
)


class RenderContext:
    """A renderer with what is worked out once per dataset.

    Picklable when the renderer is, as those of the cookbook's ``get_renderer()`` are.

    Args:
        renderer: the renderer of the model under training.
        tokenizer: its tokenizer, if not ``renderer.tokenizer``.
        images: whether the renderer can carry images; found out when ``None``.
        model: name of the policy in messages.
    """

    def __init__(
        self,
        renderer: Renderer,
        *,
        tokenizer: Tokenizer | None = None,
        images: bool | None = None,
        model: str = "rl/policy",
    ) -> None:
        self.renderer = renderer
        self.tokenizer: Tokenizer = tokenizer if tokenizer is not None else renderer.tokenizer
        self.images = carries_images(renderer) if images is None else images
        self.model = model
        self._set_up()

    def _set_up(self) -> None:
        self.stops: list[str] | list[int] = self.renderer.get_stop_sequences()
        self.parser = ReplyParser(self.renderer, self.tokenizer, stops=self.stops, model=self.model)
        self.extension = Extension(self.renderer, self.tokenizer, self.stops)
        self.extends = bool(self.renderer.has_extension_property)
        self._tails: dict[tuple[str, ...], int] = {}
        self._warned: set[str] = set()

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by renderer; a tokenizer is loaded with it."""
        own = None if self.tokenizer is self.renderer.tokenizer else self.tokenizer
        return (_rebuild, (self.renderer, own, self.images, self.model))

    def check_tools(self, tools: Sequence[ToolInfo]) -> None:
        """Make sure that the renderer can describe tools.

        Raises:
            RendererError: It has no tool format.
        """
        if tools:
            conversation_prefix(self.renderer, [], tools)

    def warn_once(self, topic: str, message: str) -> None:
        """Log a warning the first time that a topic comes up in this dataset."""
        if topic not in self._warned:
            self._warned.add(topic)
            logger.warning(message)

    def check_is_due(self, roles: tuple[str, ...]) -> bool:
        """Return whether a kind of tail should be checked now: the 1st, 2nd, 4th, 8th … time."""
        count = self._tails.get(roles, 0) + 1
        self._tails[roles] = count
        return count & (count - 1) == 0

    def verify(self, tail: Tail, conversation: list[Message]) -> bool:
        """Check that the whole conversation, rendered, ends like a tail.

        A custom renderer may claim the extension property and still render a message by
        its place in the conversation. Then nothing is extended in this dataset any more.
        """
        whole = flatten(self.renderer.build_generation_prompt(conversation).chunks)
        expected = flatten(tail.chunks)
        if whole[len(whole) - len(expected) :] == expected:
            return True
        self.extends = False
        self.warn_once(
            "extension",
            f"{type(self.renderer).__name__} says that prompts extend each other, but it "
            "renders new messages by what stands before them. Every prompt is rendered as a "
            "whole, and a trajectory becomes several datums.",
        )
        return False


def _rebuild(
    renderer: Renderer, tokenizer: Tokenizer | None, images: bool, model: str
) -> RenderContext:
    return RenderContext(renderer, tokenizer=tokenizer, images=images, model=model)


def carries_images(renderer: Renderer) -> bool:
    """Return whether a renderer takes images; text renderers drop them without a word."""
    if getattr(renderer, "image_processor", None) is not None:
        return True
    return type(renderer).__name__ == "TmlV0Renderer"


class _Reply(NamedTuple):
    """A reply of the policy, to be recognised in later requests."""

    key: MessageKey
    rendering: Message
    sampled: int


class EpisodeTokens:
    """Turns requests into prompts, and sampled tokens into replies, for one episode.

    Call :meth:`prompt` and then :meth:`parse` for each request, in turn.

    Args:
        context: the dataset's renderer.
        task: name of the task, for messages.
        sample_id: id of the sample, for messages.
        epoch: epoch of the sample, from 1.
        shared_prompts: first prompts shared by the episodes of a group.
    """

    def __init__(
        self,
        context: RenderContext,
        *,
        task: str,
        sample_id: int | str | None,
        epoch: int = 1,
        shared_prompts: PromptCache | None = None,
    ) -> None:
        self._context = context
        self._task = task
        self._sample_id = sample_id
        self._epoch = epoch
        self._shared = shared_prompts
        self._turns = Turns()
        self._replies: dict[str, _Reply] = {}
        self._last: Turn | None = None
        self._ledger = _Ledger()

    def prompt(self, request: TurnRequest) -> tinker.ModelInput:
        """Return the prompt for a request.

        Raises:
            RendererError: The renderer cannot carry a message or the tools.
            EpisodeError: The solver asked for what one sampled reply cannot give
                (``num_choices`` above one); its cause is ``policy``.
        """
        self._check_config(request)
        messages = list(request.messages)
        tools = _offered(request)
        keys = [message_key(message) for message in messages]
        offer = tools_key(tools)
        match = self._turns.find(offer, keys, messages)
        with self._named():
            turn = self._continued(match, messages, keys, tools) if match else None
            if turn is None:
                turn = self._fresh(messages, keys, tools, offer)
        self._ledger.prompted(turn, self._last, self._reencoded(turn, messages))
        self._turns.add(turn)
        self._last = turn
        return tinker.ModelInput(chunks=turn.all_chunks())

    def stop_condition(self, request: TurnRequest) -> list[str] | list[int]:
        """Return what ends a reply: the renderer's stop sequences and the solver's.

        A sampler takes strings or token ids, not both. A stop sequence that is one token
        joins a renderer's ids; any other is left to :meth:`parse`, which cuts the text there.
        """
        stops = self._context.stops
        wanted = [seq for seq in request.config.stop_seqs or [] if seq]
        texts = [stop for stop in stops if isinstance(stop, str)]
        if texts:
            return list(dict.fromkeys([*texts, *wanted]))
        ids = [stop for stop in stops if isinstance(stop, int)]
        for seq in wanted:
            tokens = self._context.tokenizer.encode(seq, add_special_tokens=False)
            if len(tokens) == 1:
                ids.append(tokens[0])
            else:
                self._context.warn_once(
                    f"stop_seqs:{seq}",
                    f"task {self._task!r}: the stop sequence {seq!r} is not one token, so the "
                    "sampler cannot stop at it; replies are cut there afterwards.",
                )
        return list(dict.fromkeys(ids))

    def parse(
        self, tokens: Sequence[int], *, stop_reason: str | None, request: TurnRequest
    ) -> ModelOutput:
        """Return the model output that sampled tokens stand for.

        Args:
            tokens: everything that was sampled, the stop token included.
            stop_reason: the sampler's ``"stop"`` or ``"length"``, if it is known.
            request: the request that was last given to :meth:`prompt`.

        Returns:
            One choice with stop reason ``stop``, ``tool_calls`` or ``max_tokens``, and usage.
        """
        turn = self._last
        if turn is None or turn.reply is not None:
            raise RuntimeError("parse() answers a prompt(): call that first, once a turn")
        with self._named():
            reply = self._context.parser.parse(
                tokens,
                at_limit=stop_reason == "length",
                stop_seqs=request.config.stop_seqs or (),
                tools=_offered(request),
            )
        turn.sampled = tuple(tokens)
        turn.reply = frozen(message_key(reply.message))
        turn.reply_id = reply.message.id
        turn.continues = reply.continues
        if reply.message.id is not None:
            self._replies[reply.message.id] = _Reply(turn.reply, reply.rendering, len(tokens))
        self._ledger.replied(turn, truncated=reply.truncated, cut=reply.stop_seq is not None)
        reason: StopReason = "tool_calls" if reply.message.tool_calls else "stop"
        if reply.truncated:
            reason = "max_tokens"
        usage = ModelUsage(
            input_tokens=turn.length,
            output_tokens=len(tokens),
            total_tokens=turn.length + len(tokens),
        )
        return ModelOutput(
            model=self._context.model,
            choices=[ChatCompletionChoice(message=reply.message, stop_reason=reason)],
            usage=usage,
            input_context_tokens=turn.length,
        )

    @property
    def metrics(self) -> Metrics:
        """Figures about the episode so far; see ``docs/tokens.md``."""
        return self._ledger.metrics(self._last)

    def _continued(
        self,
        match: Match,
        messages: list[ChatMessage],
        keys: list[MessageKey],
        tools: Sequence[ToolInfo],
    ) -> Turn | None:
        """Return the prompt that continues an earlier one, if there can be one."""
        base = match.turn
        if match.repeats:
            return Turn(base.tools, base.keys, base.chunks, base.length, base.parent)
        if not self._context.extends:
            return None
        new = [self._convert(m, key) for m, key in _pairs(messages, keys, match.position)]
        calls = list(getattr(messages[match.position - 1], "tool_calls", None) or [])
        before = keys[: match.position - 1]
        follows_user = any(key.role == "user" for key in before)
        tail = self._context.extension.after_reply(calls=calls, follows_user=follows_user, new=new)
        if tail is None or not self._verified(tail, calls, messages, keys, tools, match.position):
            return None
        chunks = merged([*_spoken(base, tail, self._context), *tail.chunks])
        return Turn(
            tools=base.tools,
            keys=tuple(map(frozen, keys[match.position :])),
            chunks=chunks,
            length=base.length + sum(chunk.length for chunk in chunks),
            parent=base,
        )

    def _verified(
        self,
        tail: Tail,
        calls: list[ToolCall],
        messages: list[ChatMessage],
        keys: list[MessageKey],
        tools: Sequence[ToolInfo],
        position: int,
    ) -> bool:
        roles = ("calls" if calls else "text", *(message.role for message in messages[position:]))
        if not self._context.check_is_due(roles):
            return True
        return self._context.verify(tail, self._whole(messages, keys, tools))

    def _fresh(
        self,
        messages: list[ChatMessage],
        keys: list[MessageKey],
        tools: Sequence[ToolInfo],
        offer: str,
    ) -> Turn:
        """Return the prompt of a conversation that is rendered as a whole."""
        shared = self._shared if self._last is None else None
        cache_key = prompt_key(offer, keys) if shared is not None else b""
        chunks = shared.get(cache_key) if shared is not None else None
        if chunks is None:
            whole = self._whole(messages, keys, tools)
            chunks = merged(self._context.renderer.build_generation_prompt(whole).chunks)
            if shared is not None:
                shared.put(cache_key, chunks)
        length = sum(chunk.length for chunk in chunks)
        return Turn(offer, tuple(map(frozen, keys)), chunks, length)

    def _whole(
        self, messages: list[ChatMessage], keys: list[MessageKey], tools: Sequence[ToolInfo]
    ) -> list[Message]:
        prefix, consumed = conversation_prefix(self._context.renderer, messages, tools)
        return [*prefix, *(self._convert(m, key) for m, key in _pairs(messages, keys, consumed))]

    def _convert(self, message: ChatMessage, key: MessageKey) -> Message:
        """Convert a message; a reply of the policy is taken as the renderer parsed it."""
        reply = self._replies.get(message.id or "")
        if reply is not None and reply.key == key:
            return reply.rendering
        return renderer_message(message, images=self._context.images)

    def _reencoded(self, turn: Turn, messages: list[ChatMessage]) -> int:
        """Return how many sampled tokens a fresh prompt holds as text that was encoded again."""
        if turn.parent is not None:
            return 0
        replies = (self._replies.get(message.id or "") for message in messages)
        return sum(reply.sampled for reply in replies if reply is not None)

    def _check_config(self, request: TurnRequest) -> None:
        config = request.config
        if config.num_choices is not None and config.num_choices > 1:
            raise EpisodeError(
                f"the solver asked for num_choices={config.num_choices}, but a policy under "
                "training gives one reply to a prompt. Use group_size for several replies.",
                cause=Cause.POLICY,
                task=self._task,
                sample_id=self._sample_id,
                epoch=self._epoch,
            )
        ignored = _ignored(config)
        if ignored:
            self._context.warn_once(
                f"config:{','.join(ignored)}",
                f"task {self._task!r} sets {', '.join(ignored)}; the trainer's sampler decides "
                "about these, so they have no effect.",
            )
        if request.tool_choice not in ("auto", "none") and request.tools:
            self._context.warn_once(
                "tool_choice",
                f"task {self._task!r} forces a tool choice ({request.tool_choice}), which "
                "cannot be imposed on the sampler: the policy is free to answer as it likes.",
            )

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name task and sample in whatever a renderer raises, its own kinds of error included."""
        try:
            yield
        except Exception as error:
            raise RendererError(
                f"task {self._task!r}, sample {self._sample_id!r}: {error or type(error).__name__}"
            ) from error


class _Ledger:
    """Counts what an episode's tokens will cost in training."""

    def __init__(self) -> None:
        self._turns = 0
        self._segments = 0
        self._first_divergence: int | None = None
        self._closed = 0
        self._sampled = 0
        self._resampled = 0
        self._truncated = 0
        self._cut = 0

    def prompted(self, turn: Turn, last: Turn | None, reencoded: int) -> None:
        """Count a prompt; it opens a segment unless it begins with all that came before."""
        if last is None:
            self._segments = 1
        elif turn.parent is not last and not _begins_with(turn, last):
            self._segments += 1
            self._closed += last.length + len(last.sampled)
            self._resampled += reencoded
            if self._first_divergence is None:
                self._first_divergence = self._turns
        self._turns += 1

    def replied(self, turn: Turn, *, truncated: bool, cut: bool) -> None:
        """Count a reply."""
        self._sampled += len(turn.sampled)
        self._truncated += truncated
        self._cut += cut

    def metrics(self, last: Turn | None) -> Metrics:
        """Return the figures; ``tokens/first_divergence`` is there only if there was one."""
        open_tokens = last.length + len(last.sampled) if last else 0
        metrics: Metrics = {
            "tokens/segments": self._segments,
            "tokens/resampled": self._resampled,
            "tokens/prompt": last.length if last else 0,
            "tokens/sampled": self._sampled,
            "tokens/trained": self._closed + open_tokens,
            "tokens/truncated_replies": self._truncated,
            "tokens/stop_seq_cuts": self._cut,
        }
        if self._first_divergence is not None:
            metrics["tokens/first_divergence"] = self._first_divergence
        return metrics


def _begins_with(turn: Turn, last: Turn) -> bool:
    start = [*flatten(last.all_chunks()), *last.sampled]
    return flatten(turn.all_chunks())[: len(start)] == start


def _spoken(base: Turn, tail: Tail, context: RenderContext) -> list[tinker.ModelInputChunk]:
    """Return the reply's own tokens, with the end of turn if they lack it."""
    tokens = list(base.sampled)
    texts = [stop for stop in context.stops if isinstance(stop, str)]
    if texts:
        text = str(context.tokenizer.decode(tokens))
        ended = any(stop in text for stop in texts)
    else:
        ended = tuple(tokens[-len(tail.terminator) :]) == tail.terminator
    if not ended:
        tokens.extend(tail.terminator)
    return [tinker.EncodedTextChunk(tokens=tokens)] if tokens else []


def _offered(request: TurnRequest) -> Sequence[ToolInfo]:
    return () if request.tool_choice == "none" else request.tools


def _pairs(
    messages: list[ChatMessage], keys: list[MessageKey], start: int
) -> Iterator[tuple[ChatMessage, MessageKey]]:
    return zip(messages[start:], keys[start:], strict=True)


def _ignored(config: GenerateConfig) -> list[str]:
    return [name for name in _SAMPLER_OPTIONS if getattr(config, name, None) is not None]
