"""Counts what the tokens of an episode will cost in training."""

from __future__ import annotations

from inspect_tinker_plugin.episode.types import Metrics
from inspect_tinker_plugin.rl.extension import flatten
from inspect_tinker_plugin.rl.turns import Turn


class Ledger:
    """The figures of one episode. A prompt counts once it is answered, as in a trajectory."""

    def __init__(self) -> None:
        self._last: Turn | None = None
        self._turns = 0
        self._segments = 0
        self._first_divergence: int | None = None
        self._closed = 0
        self._sampled = 0
        self._resampled = 0
        self._truncated = 0
        self._cut = 0

    def replied(self, turn: Turn, *, reencoded: int, truncated: bool, cut: bool) -> None:
        """Count a turn.

        Args:
            turn: the turn, with its reply.
            reencoded: sampled tokens of earlier replies that its prompt holds as text that
                was encoded again.
            truncated: whether the token limit cut the reply.
            cut: whether a stop sequence of the solver cut it.
        """
        last = self._last
        if last is None:
            self._segments = 1
        elif turn.parent is not last and not _begins_with(turn, last):
            self._segments += 1
            self._closed += last.length + len(last.sampled)
            self._resampled += reencoded
            if self._first_divergence is None:
                self._first_divergence = self._turns
        self._last = turn
        self._turns += 1
        self._sampled += len(turn.sampled)
        self._truncated += truncated
        self._cut += cut

    def metrics(self) -> Metrics:
        """Return the figures; ``tokens/first_divergence`` is there only if there was one."""
        last = self._last
        metrics: Metrics = {
            "tokens/segments": self._segments,
            "tokens/resampled": self._resampled,
            "tokens/prompt": last.length if last else 0,
            "tokens/sampled": self._sampled,
            "tokens/trained": self._closed + (last.length + len(last.sampled) if last else 0),
            "tokens/truncated_replies": self._truncated,
            "tokens/stop_seq_cuts": self._cut,
        }
        if self._first_divergence is not None:
            metrics["tokens/first_divergence"] = self._first_divergence
        return metrics


def _begins_with(turn: Turn, last: Turn) -> bool:
    """Return whether a prompt begins with all of an earlier turn, as the trainer looks at it."""
    start = [*flatten(last.all_chunks()), *last.sampled]
    return flatten(turn.all_chunks())[: len(start)] == start
