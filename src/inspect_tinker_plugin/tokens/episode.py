"""The tokens of an episode: each prompt continues the last one, including the sampled tokens.

::

    context = DatasetRenderer(renderer)                 # one per dataset
    cache = PromptCache()                               # one per group
    episode = EpisodeTokens(context, task="math", sample_id=7, shared_prompts=cache)
    prompt = episode.prompt(request)                    # a TurnRequest
    stop = episode.stop_condition(request)
    output = episode.parse(sampled, stop_reason="stop", request=request)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import tinker
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ModelOutput,
    ModelUsage,
    StopReason,
)
from inspect_ai.tool import ToolInfo
from tinker_cookbook.renderers import Message

from inspect_tinker_plugin.contracts.episodes import Metrics, TurnRequest
from inspect_tinker_plugin.contracts.errors import Cause, EpisodeError, RendererError
from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.tokens.continuation import (
    Match,
    Reply,
    TokenCounts,
    Turn,
    Turns,
    is_reply,
)
from inspect_tinker_plugin.tokens.dataset_renderer import (
    ONE_AT_A_TIME,
    DatasetRenderer,
    stop_condition,
    warn_of_ignored,
)
from inspect_tinker_plugin.tokens.message_keys import (
    DIALECTS,
    Dialect,
    MessageKey,
    ToolsKey,
    message_key,
    tools_key,
)
from inspect_tinker_plugin.tokens.messages import (
    call_name,
    conversation_prefix,
    renderer_message,
)
from inspect_tinker_plugin.tokens.prompts import (
    PromptCache,
    flatten,
    merge_chunks,
)

__all__ = ["DatasetRenderer", "EpisodeTokens", "PromptCache"]


T = TypeVar("T")

LEAST_ROOM = 2
"""Tokens that a reply needs; where fewer are left, the cookbook's runner would end the rollout."""


class OverWindowError(Exception):
    """A prompt leaves no room for a reply in the context window.

    Attributes:
        answer: What a model API answers then: an output with stop reason ``model_length``.
    """

    def __init__(self, length: int, window: int, model: str) -> None:
        super().__init__(
            f"The prompt has {counted(length, 'token')}, and the model takes {window:,} with the "
            "reply."
        )
        self.answer = ModelOutput.from_content(model, str(self), stop_reason="model_length")


class _Request(NamedTuple):
    """A request, and its place among the turns."""

    messages: list[ChatMessage]
    keys: list[MessageKey]
    tools: Sequence[ToolInfo]
    effort: float | None
    """The reasoning effort that it asks for, where the renderer takes one."""

    offer: ToolsKey
    """Key of the tools and the effort."""

    dialect: Dialect | None
    match: Match


class EpisodeTokens:
    """Turns requests into prompts, and sampled tokens into replies, for one episode.

    Call :meth:`prompt` and then :meth:`parse` for each request; several requests may wait for their
    replies at once.
    """

    def __init__(
        self,
        context: DatasetRenderer,
        *,
        task: str,
        sample_id: int | str | None,
        epoch: int = 1,
        shared_prompts: PromptCache | None = None,
        context_window: int | None = None,
    ) -> None:
        self._context = context
        self._window = context_window
        self._task = task
        self._sample_id = sample_id
        self._epoch = epoch
        self._shared = shared_prompts
        self._turns = Turns()
        self._ledger = TokenCounts()
        self._call_ids: dict[str, str] = {}
        self._waiting: dict[int, Turn] = {}
        """The turns that wait for their replies, by the numbers of their requests."""

    def prompt(self, request: TurnRequest) -> tinker.ModelInput:
        """Return the prompt for a request.

        Raises:
            OverWindowError: The context window leaves no room for a reply. The request has no turn.
            RendererError: The renderer cannot carry a message or the tools, and nothing was
                sampled yet.
            EpisodeError: It cannot, and the policy has brought that about; or the solver asked
                for what one sampled reply cannot give (``num_choices`` above one, a ``max_tokens``
                of zero). Its cause is ``policy``.
        """
        self._check_options(request)
        warn_of_ignored(self._context, request, self._task)
        turn, found = self._render(lambda: self._find_turn(request))
        if self._window is not None and self._window - turn.length < LEAST_ROOM:
            raise self._over_window(turn.length, self._window)
        self._adopt(turn, found)
        self._waiting[request.index] = turn
        return turn.prompt

    def _find_turn(self, request: TurnRequest) -> tuple[Turn, _Request]:
        """Find the place of a request among the turns, and its prompt."""
        tools = _find_offered(request)
        effort = self._context.effort(request.config.reasoning_effort)
        offer = tools_key(tools) if effort is None else (*tools_key(tools), str(effort))
        dialect = None if request.dialect is None else DIALECTS.get(request.dialect)
        messages = self._turns.restore_order(list(request.messages), dialect)
        keys = list(map(message_key, messages))
        match = self._turns.find(offer, messages, keys, dialect)
        found = _Request(messages, keys, tools, effort, offer, dialect, match)
        turn = self._find_repeated(found) or self._find_continued(found)
        return turn or self._fresh(found), found

    def _adopt(self, turn: Turn, request: _Request) -> None:
        """Add a turn that waits for its reply."""
        self._turns.add(turn, request.match, request.messages, request.keys)
        self._count_control_tokens(request)
        if turn.parent is not None and turn.parent.continued:
            # An identical turn, which gave the same reply, may still have no continuation.
            again = flatten(turn.prompt.chunks)
            turn.parent = self._ledger.branch_before(again) or turn.parent
        if turn.parent is not None:
            turn.parent.continued = True

    def _count_control_tokens(self, request: _Request) -> None:
        """Count control tokens that new messages spell, and warn of the first in the dataset."""
        known = request.match.known
        new = [*request.keys[known:], *(() if known else request.offer)]
        spelled = self._context.control.find_spelled(new)
        self._ledger.control_in_text += len(spelled)
        if spelled:
            how = "as text" if self._context.control.encoded_as_text else "with a space in it"
            self._context.warn_once(
                "control_in_text",
                f"task {self._task!r}, sample {self._sample_id!r}: a message or a tool's "
                f"description spells {spelled[0]!r}. The policy gets it {how}, never as the "
                "control token; tokens/control_in_text counts such spellings.",
            )

    def stop_condition(self, request: TurnRequest) -> list[str] | list[int]:
        """Return what ends a reply: the stop sequences of the renderer and of the solver.

        A sampler takes strings or token ids, not both. A stop sequence that is one token
        joins a renderer's ids; any other is left to :meth:`parse`, which cuts the text there.

        Raises:
            RendererError: A stop sequence is no text that has tokens, and nothing was sampled yet.
            EpisodeError: The same, later.
        """
        return self._render(lambda: stop_condition(self._context, request, self._task))

    def _over_window(self, length: int, window: int) -> OverWindowError:
        """Count a call that gets no prompt, and warn of the first in the dataset."""
        self._ledger.over_window += 1
        error = OverWindowError(length, window, self._context.model)
        self._context.warn_once(
            "over_window",
            f"task {self._task!r}, sample {self._sample_id!r}: {error} (context_window) The call "
            "is answered with stop reason `model_length`, as by a model API; tokens/over_window "
            "counts such calls.",
        )
        return error

    def refuse(self, error: EpisodeError) -> None:
        """Count a request that gets no prompt, and warn of the first in the dataset."""
        self._ledger.refused += 1
        self._context.warn_once(
            "refused",
            f"{error} A program asked for it and was shown an error of its model API, as it may "
            "be in an eval.",
        )

    def parse(
        self, tokens: Sequence[int], *, stop_reason: str | None, request: TurnRequest
    ) -> ModelOutput:
        """Return the model output that sampled tokens stand for.

        Args:
            tokens: everything that was sampled, the stop token included.
            stop_reason: the sampler's ``"stop"`` or ``"length"``, if it is known.
            request: the request, as it was given to :meth:`prompt`.

        Returns:
            One choice with stop reason ``stop``, ``tool_calls`` or ``max_tokens``, and usage.
        """
        turn = self._waiting.pop(request.index, None)
        if turn is None:
            raise RuntimeError("parse() answers a prompt(): call that first, once per turn")
        reply = self._name_errors(
            lambda: self._context.parser.parse(
                tokens,
                stop_reason=stop_reason,
                stop_seqs=request.config.stop_seqs or (),
                max_tokens=request.config.max_tokens,
                tools=_find_offered(request),
            )
        )
        turn.sampled, turn.kept = tuple(tokens), reply.kept
        self._turns.answer(
            turn,
            Reply(
                message=reply.message.model_copy(deep=True),
                key=message_key(reply.message),
                rendering=reply.rendering,
                continues=reply.continues,
            ),
        )
        self._call_ids.update(reply.call_ids)
        self._ledger.add(turn, truncated=reply.truncated, cut=reply.stop_seq is not None)
        reason: StopReason = "tool_calls" if reply.message.tool_calls else "stop"
        if reply.truncated:
            reason = "max_tokens"
        said = min(len(tokens), request.config.max_tokens or len(tokens))  # a provider says no more
        return ModelOutput(
            model=self._context.model,
            choices=[ChatCompletionChoice(message=reply.message, stop_reason=reason)],
            completion=reply.message.text,
            usage=ModelUsage(
                input_tokens=turn.length,
                output_tokens=said,
                total_tokens=turn.length + said,
            ),
            input_context_tokens=turn.length,
        )

    @property
    def metrics(self) -> Metrics:
        """Figures about the episode so far; docs/agents.md says what they count."""
        return self._ledger.metrics()

    @property
    def turns(self) -> Sequence[Turn]:
        """The answered turns so far, in time."""
        return self._ledger.answered

    def forget(self) -> None:
        """Forget what only further prompts would need; :attr:`turns` and :attr:`metrics` stay."""
        self._turns = Turns()

    def _find_repeated(self, request: _Request) -> Turn | None:
        """Return a turn with the prompt of an equal request, if there was one."""
        match = request.match
        if match.known < len(request.messages) or not match.place.asked:
            return None
        first = match.place.asked[-1]
        return Turn(first.has_user, first.prompt, first.length, parent=first.parent)

    def _find_continued(self, request: _Request) -> Turn | None:
        """Return a turn that continues an earlier reply, if there can be one."""
        base = request.match.turn
        if base is None or base.reply is None or not self._context.extends:
            return None
        new = request.messages[request.match.position :]
        again = self._turns.replies_among(new, request.dialect)
        calls = [
            call_name(call, self._call_ids, self._context.write)
            for call in base.reply.message.tool_calls or []
        ]
        tail = self._context.extension.after_reply(
            calls=calls,
            follows_user=base.has_user,
            new=self._convert(new, again, request.dialect),
        )
        if tail is None:
            return None
        roles = ("calls" if calls else "text", *dict.fromkeys(message.role for message in new))
        if self._context.check_is_due(roles) and not self._context.verify(
            tail, self._whole(request), request.effort
        ):
            return None
        spoken = self._context.extension.close_reply(base.spoken, tail)
        turn = self._turn(request, merge_chunks([*spoken, *tail.chunks]), after=base)
        return self._with_replies(turn, request, again)

    def _fresh(self, request: _Request) -> Turn:
        """Return a turn whose conversation is rendered as a whole."""

        def render() -> list[tinker.ModelInputChunk]:
            return merge_chunks(self._context.build(self._whole(request), request.effort))

        if self._ledger.answered:
            turn = self._turn(request, render())
            turn.parent = self._ledger.branch_before(flatten(turn.prompt.chunks))
            if turn.parent is not None:
                return turn
        else:
            key = (request.offer, tuple(request.keys))
            chunks = render() if self._shared is None else self._shared.find_or_make(key, render)
            turn = self._turn(request, chunks)
        again = self._turns.replies_among(request.messages, request.dialect)
        return self._with_replies(turn, request, again)

    def _turn(
        self,
        request: _Request,
        chunks: list[tinker.ModelInputChunk],
        *,
        after: Turn | None = None,
    ) -> Turn:
        """Make a turn of a whole prompt, or of what it adds after a turn that it continues."""
        before = [] if after is None else after.prompt.chunks
        length = sum(chunk.length for chunk in chunks)
        return Turn(
            has_user=any(message.role == "user" for message in request.messages),
            prompt=tinker.ModelInput.model_construct(chunks=[*before, *chunks]),
            length=length if after is None else after.length + length,
            parent=after,
        )

    def _with_replies(self, turn: Turn, request: _Request, again: Mapping[int, Turn]) -> Turn:
        """Note of a turn which earlier replies its prompt holds as text."""
        turn.lossy = turn.parent is not None and request.match.lossy
        turn.rendered = bool(again) or request.match.departs(request.messages)
        turn.resampled = sum(len(each.sampled) for each in again.values())
        return turn

    def _whole(self, request: _Request) -> list[Message]:
        context = self._context
        prefix, consumed = conversation_prefix(
            context.renderer, request.messages, request.tools, context.write
        )
        rest = request.messages[consumed:]
        again = self._turns.replies_among(rest, request.dialect)
        return [*prefix, *self._convert(rest, again, request.dialect)]

    def _convert(
        self,
        messages: Sequence[ChatMessage],
        replies: Mapping[int, Turn],
        dialect: Dialect | None,
    ) -> list[Message]:
        """Convert messages; a reply of the policy is taken as the renderer parsed it."""
        converted = []
        for index, message in enumerate(messages):
            turn = replies.get(index)
            if (
                turn is not None
                and turn.reply is not None
                and isinstance(message, ChatMessageAssistant)
                and is_reply(turn, message, dialect)
            ):
                converted.append(turn.reply.rendering)
            else:
                converted.append(
                    renderer_message(
                        message,
                        images=self._context.images,
                        call_ids=self._call_ids,
                        write=self._context.write,
                    )
                )
        return converted

    def _check_options(self, request: TurnRequest) -> None:
        choices: object = request.config.num_choices
        if choices not in (None, 0, 1):
            raise self._not_honoured_error(
                f"the solver asked for num_choices={choices}, but a policy under training "
                "gives one reply to a prompt. Use group_size for several replies."
            )
        most: object = request.config.max_tokens  # of a program, anything that JSON can hold
        if most is not None and not (isinstance(most, int) and most > 0):
            raise self._not_honoured_error(f"max_tokens={most!r} is not a whole number above 0")

    def _not_honoured_error(self, why: str) -> EpisodeError:
        return EpisodeError(
            why,
            cause=Cause.POLICY,
            task=self._task,
            sample_id=self._sample_id,
            epoch=self._epoch,
        )

    def _render(self, work: Callable[[], T]) -> T:
        """Render; what cannot be rendered after the policy has spoken is the episode's failure.

        Before, it is the task that does not fit the renderer, and so in every episode.
        """
        try:
            return self._name_errors(work)
        except RendererError as error:
            if not self._ledger.answered:
                raise
            raise self._not_honoured_error(str(error.__cause__ or error)) from error

    def _name_errors(self, work: Callable[[], T]) -> T:
        """Name task and sample in whatever a renderer raises, its own kinds of error included."""
        try:
            with ONE_AT_A_TIME:
                return work()
        except Exception as error:
            raise RendererError(
                f"task {self._task!r}, sample {self._sample_id!r}: {error or type(error).__name__}"
            ) from error


def _find_offered(request: TurnRequest) -> Sequence[ToolInfo]:
    return () if request.tool_choice == "none" else request.tools
