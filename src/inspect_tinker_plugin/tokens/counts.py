"""Counts the tokens that an episode costs in training, and how its prompts were made."""

from __future__ import annotations

import tinker

from inspect_tinker_plugin.episode.types import Metrics
from inspect_tinker_plugin.tokens.extension import FlatPrompt, flatten
from inspect_tinker_plugin.tokens.turns import Turn


class TokenCounts:
    """The token metrics of one episode. A prompt counts once it is answered, as in a trajectory.

    Turns are counted by branch, the order in which the group passes them to the trainer.
    """

    def __init__(self) -> None:
        self.answered: list[Turn] = []
        self._leaves: dict[int, Turn] = {}
        self._first_divergence: int | None = None
        self._sampled = 0
        self._resampled = 0
        self._truncated = 0
        self._cut = 0
        self._unseen = 0
        self._exact = 0
        self._lossy = 0
        self._rendered = 0

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

    def replied(
        self, turn: Turn, *, resampled: int, rendered: bool, lossy: bool, truncated: bool, cut: bool
    ) -> None:
        """Count a turn.

        Args:
            turn: the turn, with its reply.
            resampled: sampled tokens of earlier replies that its prompt holds as text that
                was encoded again.
            rendered: whether earlier turns had to be rendered again for its prompt.
            lossy: whether its prompt continues a reply that came back changed by its transport.
            truncated: whether the token limit cut the reply.
            cut: whether a stop sequence of the solver cut it.
        """
        begins = self._leaves.pop(id(turn.parent), None) is None
        if begins and self.answered and self._first_divergence is None:
            self._first_divergence = len(self.answered)
        self._leaves[id(turn)] = turn
        self.answered.append(turn)
        self._rendered += rendered
        if turn.parent is not None and not rendered:
            self._lossy += lossy
            self._exact += not lossy
        self._resampled += resampled
        self._sampled += len(turn.sampled)
        self._truncated += truncated
        self._cut += cut
        self._unseen += len(turn.sampled) - turn.kept

    def metrics(self) -> Metrics:
        """Return the metrics; ``tokens/first_divergence`` is present only if there was one."""
        last = self.answered[-1] if self.answered else None
        metrics: Metrics = {
            "tokens/segments": len(self._leaves),
            "tokens/continued": self._exact,
            "tokens/continued_lossy": self._lossy,
            "tokens/rerendered": self._rendered,
            "tokens/resampled": self._resampled,
            "tokens/prompt": last.length if last else 0,
            "tokens/sampled": self._sampled,
            "tokens/trained": sum(leaf.length + leaf.kept for leaf in self._leaves.values()),
            "tokens/truncated_replies": self._truncated,
            "tokens/stop_seq_cuts": self._cut,
            "tokens/unseen": self._unseen,
        }
        if self._first_divergence is not None:
            metrics["tokens/first_divergence"] = self._first_divergence
        return metrics
