"""Decides which earlier reply a request continues: the turns of an episode, as a tree.

A solver may run several conversations at once (sub-agents, forks) or go back to an earlier
turn. Each model call is a turn; a turn whose prompt begins with the prompt and the reply of
another one is its child. Conversations are kept as a tree of messages (:class:`Place`), in which
every request is followed from its start: nothing reports that a solver changes a message in place,
and it may pass copies or rebuild messages, so each turn has to look at all of them. What the turns
cost in tokens is counted by branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import tinker
from inspect_ai.model import ChatMessage, ChatMessageAssistant
from tinker_cookbook.renderers import Message

from inspect_tinker_plugin.contracts.episodes import Metrics
from inspect_tinker_plugin.tokens.message_keys import (
    Dialect,
    MessageKey,
    ToolsKey,
    message_key,
    spoken_letters,
)
from inspect_tinker_plugin.tokens.prompts import FlatPrompt, flatten


class Place:
    """A conversation up to some message, with what may follow it."""

    __slots__ = ("asked", "following")

    def __init__(self) -> None:
        self.following: dict[MessageKey, Place] = {}
        """Places after messages that are not replies of the policy."""

        self.asked: list[Turn] = []
        """Turns whose request ends here; one of their replies may come next."""


@dataclass(eq=False)
class Reply:
    """A reply of the policy, to be recognised in later requests."""

    message: ChatMessageAssistant
    """A copy that the solver cannot change."""

    key: MessageKey
    rendering: Message
    """The same for the renderer, in case the reply has to be rendered again."""

    continues: bool
    """Whether the kept tokens say exactly what the solver saw, so a prompt may continue them."""


@dataclass(eq=False)
class Turn:
    """One prompt, and the reply to it once there is one."""

    has_user: bool
    """Whether the request has a user message anywhere."""

    prompt: tinker.ModelInput
    length: int
    """Tokens of the prompt."""

    parent: Turn | None = None
    lossy: bool = False
    """Whether the prompt continues a reply that came back changed by its transport."""

    rendered: bool = False
    """Whether it holds earlier turns as text that was encoded again, or continues none of them."""

    resampled: int = 0
    """Sampled tokens of the replies among them."""

    sampled: tuple[int, ...] = ()
    kept: int = 0
    """Sampled tokens that the solver saw; later ones are not trained on."""

    reply: Reply | None = None
    continued: bool = False
    """Whether a later prompt was made that begins with this prompt and its reply."""

    @property
    def spoken(self) -> tuple[int, ...]:
        """The sampled tokens that the solver saw."""
        return self.sampled[: self.kept]


class Match(NamedTuple):
    """How much of a request is known, and the reply that it continues."""

    turn: Turn | None
    """The turn whose reply is the last one recognised."""

    position: int
    """Number of messages up to and including that reply."""

    place: Place
    """Where the known part ends."""

    known: int
    """Number of messages of the known part."""

    lossy: bool
    """Whether the newest reply was recognised only up to what its transport loses."""

    def departs(self, messages: Sequence[ChatMessage]) -> bool:
        """Return whether a request continues with another reply than the policy's own."""
        return (
            self.known < len(messages)
            and messages[self.known].role == "assistant"
            and any(turn.reply is not None for turn in self.place.asked)
        )


class Turns:
    """The turns of one episode."""

    def __init__(self) -> None:
        self._roots: dict[ToolsKey, Place] = {}
        self._behind: dict[Turn, Place] = {}
        """The places after the replies of turns."""

        self._by_name: dict[str, list[Turn]] = {}
        self._by_wording: dict[str, list[Turn]] = {}

    def find(
        self,
        offer: ToolsKey,
        messages: Sequence[ChatMessage],
        keys: Sequence[MessageKey],
        dialect: Dialect | None,
    ) -> Match:
        """Follow a request as far as it is known; of several paths, take the one to the last reply.

        Of identical turns, take one that nothing continues yet, so that each is used once.

        Args:
            offer: key of the tools offered.
            messages: the request's messages.
            keys: their keys.
            dialect: the API that the request came through; ``None`` if no message was translated.
        """
        ways = [Match(None, 0, self._roots.setdefault(offer, Place()), 0, False)]
        ends = []
        while ways:
            turn, position, place, known, lossy = ways.pop()
            onwards = None
            while onwards is None and known < len(keys):
                key = keys[known]
                following = place.following.get(key)
                if place.asked and key.role == "assistant":
                    onwards = [
                        Match(other, known + 1, self._behind[other], known + 1, how == "lossy")
                        for other, how in _find_replies(place.asked, messages[known], key, dialect)
                    ]
                    if following is not None:
                        onwards.insert(0, Match(turn, position, following, known + 1, lossy))
                elif following is None:
                    break
                else:
                    place, known = following, known + 1
            if onwards:
                ways += onwards
            else:
                ends.append(Match(turn, position, place, known, lossy))
        return max(ends, key=_rank)

    def restore_order(
        self, messages: list[ChatMessage], dialect: Dialect | None
    ) -> list[ChatMessage]:
        """Restore the order of replies that a transport has changed.

        Inspect moves the text of a reply into the message before the last tool result, when that
        message has calls and no text (some programs split their messages so). It is moved back
        when the policy said exactly that: the calls without text, then the text.
        """
        if dialect is None or not dialect.joins_text_to_calls:
            return messages
        restored: list[ChatMessage] = []
        for index, message in enumerate(messages):
            restored.append(message)
            if message.role != "tool" or index == 0:
                continue
            joined = messages[index - 1]
            text = self._text_moved_into(joined, message, dialect)
            if text is not None and isinstance(joined, ChatMessageAssistant):
                restored[-2] = joined.model_copy(update={"content": ""})
                restored.append(text)
        return restored

    def _text_moved_into(
        self, joined: ChatMessage, result: ChatMessage, dialect: Dialect
    ) -> ChatMessageAssistant | None:
        """Return the message whose text was moved into one before a tool result."""
        if not isinstance(joined, ChatMessageAssistant):
            return None
        if not joined.tool_calls or not joined.content:
            return None
        for turn in self._named_in(joined):
            if turn.reply is None or spoken_letters(turn.reply.message):
                continue
            place = self._behind[turn].following.get(message_key(result))
            if place is None:
                continue
            text = joined.model_copy(update={"tool_calls": None, "id": None})
            key = message_key(text)
            if any(recognise(each, text, key, dialect) for each in place.asked):
                return text
        return None

    def add(
        self,
        turn: Turn,
        match: Match,
        messages: Sequence[ChatMessage],
        keys: Sequence[MessageKey],
    ) -> None:
        """Add a turn at the end of its request."""
        place = match.place
        for key in keys[match.known :]:
            place = place.following.setdefault(key, Place())
        place.asked.append(turn)
        self._behind[turn] = Place()
        # a reply that came back under a new id is looked up by that id next time
        if match.turn is not None:
            self._name(match.turn, messages[match.position - 1])

    def answer(self, turn: Turn, reply: Reply) -> None:
        """Set the reply of a turn."""
        turn.reply = reply
        self._name(turn, reply.message)
        if not reply.message.tool_calls and (wording := spoken_letters(reply.message)):
            self._by_wording.setdefault(wording, []).append(turn)

    def _name(self, turn: Turn, reply: ChatMessage) -> None:
        for name in _names(reply):
            turns = self._by_name.setdefault(name, [])
            if turn not in turns:
                turns.append(turn)

    def replies_among(
        self, messages: Sequence[ChatMessage], dialect: Dialect | None
    ) -> dict[int, Turn]:
        """Return, by index, the turns whose replies occur among messages, at any position.

        A reply that was changed still counts if it kept its own name.
        """
        found: dict[int, Turn] = {}
        for index, message in enumerate(messages):
            if not isinstance(message, ChatMessageAssistant):
                continue
            candidates = self._named_in(message)
            if not candidates:
                worded = self._by_wording.get(spoken_letters(message), ())
                candidates = [turn for turn in worded if is_reply(turn, message, dialect)]
            taken = set(map(id, found.values()))
            turn = next((turn for turn in candidates if id(turn) not in taken), None)
            if turn is not None:
                found[index] = turn
        return found

    def _named_in(self, message: ChatMessage) -> Sequence[Turn]:
        """Return the turns whose reply has the name that a message has.

        A bridge names messages by their content, so there may be several.
        """
        if message.role != "assistant":
            return ()
        for name in _names(message):
            if turns := self._by_name.get(name):
                return turns
        return ()


class TokenCounts:
    """The token metrics of one episode. A prompt counts once it is answered, as in a trajectory.

    Turns are counted by branch, the order in which the group passes them to the trainer.

    Attributes:
        answered: The turns, in time order.
        refused: Requests of programs that got an error in the place of a prompt.
        over_window: Calls that left no room for a reply in the context window.
        control_in_text: Control tokens that messages and descriptions of tools spelled.
    """

    def __init__(self) -> None:
        self.answered: list[Turn] = []
        self.refused = 0
        self.over_window = 0
        self.control_in_text = 0
        self._leaves: dict[int, Turn] = {}
        self._first_divergence: int | None = None
        self._truncated = 0
        self._cut = 0

    def branch_before(self, prompt: FlatPrompt) -> Turn | None:
        """Return a branch that a prompt continues, although it was rendered as a whole.

        The trainer compares tokens, so to it such a prompt continues the branch.
        """
        best: Turn | None = None
        for leaf in self._leaves.values():
            size = sum(
                len(chunk.tokens) if isinstance(chunk, tinker.EncodedTextChunk) else 1
                for chunk in leaf.prompt.chunks
            )
            end = size + leaf.kept
            said = list(leaf.spoken)
            if prompt[size:end] != said or (best is not None and leaf.length <= best.length):
                continue
            if prompt[:size] == flatten(leaf.prompt.chunks):
                best = leaf
        return best

    def add(self, turn: Turn, *, truncated: bool, cut: bool) -> None:
        """Count a turn."""
        begins = self._leaves.pop(id(turn.parent), None) is None
        if begins and self.answered and self._first_divergence is None:
            self._first_divergence = len(self.answered)
        self._leaves[id(turn)] = turn
        self.answered.append(turn)
        self._truncated += truncated
        self._cut += cut

    def metrics(self) -> Metrics:
        """Return the metrics; ``tokens/first_divergence`` is present only if there was one."""
        turns = self.answered
        continued = [turn for turn in turns if turn.parent is not None and not turn.rendered]
        lossy = sum(turn.lossy for turn in continued)
        metrics: Metrics = {
            "tokens/segments": len(self._leaves),
            "tokens/continued": len(continued) - lossy,
            "tokens/continued_lossy": lossy,
            "tokens/rerendered": sum(turn.rendered for turn in turns),
            "tokens/resampled": sum(turn.resampled for turn in turns),
            "tokens/prompt": turns[-1].length if turns else 0,
            "tokens/sampled": sum(len(turn.sampled) for turn in turns),
            "tokens/trained": sum(leaf.length + leaf.kept for leaf in self._leaves.values()),
            "tokens/truncated_replies": self._truncated,
            "tokens/stop_seq_cuts": self._cut,
            "tokens/unseen": sum(len(turn.sampled) - turn.kept for turn in turns),
            "tokens/refused": self.refused,
            "tokens/over_window": self.over_window,
            "tokens/control_in_text": self.control_in_text,
        }
        if self._first_divergence is not None:
            metrics["tokens/first_divergence"] = self._first_divergence
        return metrics


def recognise(
    turn: Turn, message: ChatMessage, key: MessageKey, dialect: Dialect | None
) -> str | None:
    """Return ``"exact"`` or ``"lossy"`` when a message is the reply of a turn."""
    reply = turn.reply
    if reply is None or not reply.continues:
        return None
    if key == reply.key:
        return "exact"
    if dialect is None or message.id == reply.message.id:
        return None  # nothing was translated, so what differs was changed
    if message.role != "assistant":
        return None
    return "lossy" if dialect.carries(reply.message, message) else None


def _find_replies(
    asked: Sequence[Turn], message: ChatMessage, key: MessageKey, dialect: Dialect | None
) -> list[tuple[Turn, str]]:
    """Return the turns whose reply a message is, and how; of several, those it is most like."""
    found = [(turn, how) for turn in asked if (how := recognise(turn, message, key, dialect))]
    if len(found) > 1:
        named = [each for each in found if _has_id(each[0], message)]
        return named or [each for each in found if each[1] == "exact"] or found
    return found


def is_reply(turn: Turn, message: ChatMessageAssistant, dialect: Dialect | None) -> bool:
    """Return whether a message says what a turn's reply said, even if it may not continue it."""
    reply = turn.reply
    return reply is not None and (
        message_key(message) == reply.key
        or (dialect is not None and dialect.carries(reply.message, message))
    )


def _rank(match: Match) -> tuple[int, bool, int]:
    fresh = match.turn is not None and not match.turn.continued
    return (match.position, fresh, match.known)


def _has_id(turn: Turn, message: ChatMessage) -> bool:
    return turn.reply is not None and turn.reply.message.id == message.id


def _names(message: ChatMessage) -> list[str]:
    names = [f"id:{message.id}"] if message.id is not None else []
    if isinstance(message, ChatMessageAssistant) and message.tool_calls:
        names.append(f"call:{message.tool_calls[0].id}")
    return names
