"""What the trainer makes of an episode: the order of its transitions, and the tokens they cost.

The cookbook joins a transition to the one before it when its prompt begins with that whole
sequence. A solver that runs several conversations at once interleaves their turns, so no turn
would follow its own. Transitions are ordered so that each branch of the episode is one datum;
sums over a trajectory do not depend on the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import tinker
from tinker_cookbook.rl.types import PARSE_ERROR_MASKED_METRIC_KEY, Trajectory, Transition

from inspect_tinker_plugin.contracts.episodes import Metrics
from inspect_tinker_plugin.tokens.continuation import Turn
from inspect_tinker_plugin.tokens.prompts import FlatPrompt, flatten


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

    def add(self, turn: Turn, *, truncated: bool, cut: bool) -> None:
        """Count a turn.

        Args:
            turn: the turn, with its reply.
            truncated: whether the token limit cut the reply.
            cut: whether a stop sequence of the solver cut it.
        """
        begins = self._leaves.pop(id(turn.parent), None) is None
        if begins and self.answered and self._first_divergence is None:
            self._first_divergence = len(self.answered)
        self._leaves[id(turn)] = turn
        self.answered.append(turn)
        self._rendered += turn.rendered
        if turn.parent is not None and not turn.rendered:
            self._lossy += turn.lossy
            self._exact += not turn.lossy
        self._resampled += turn.resampled
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
            "tokens/refused": self.refused,
            "tokens/over_window": self.over_window,
            "tokens/control_in_text": self.control_in_text,
        }
        if self._first_divergence is not None:
            metrics["tokens/first_divergence"] = self._first_divergence
        return metrics


def arrange(trajectory: Trajectory, turns: Sequence[Turn]) -> None:
    """Put the transitions of a trajectory in branch order, in place."""
    trajectory.transitions[:] = in_branch_order(trajectory.transitions, turns)


def leave_out(trajectory: Trajectory, side: Sequence[bool], unheard: Sequence[bool]) -> None:
    """Mark turns that are not trained on, with the mark for those whose calls cannot be read.

    A program that asks for no model under the policy's own name has no main line to keep, and all
    its turns stay.

    Args:
        trajectory: The trajectory.
        side: By turn, whether a program had asked for another model.
        unheard: By turn, whether nobody waited for the reply any more.
    """
    keep_side = all(side)
    for transition, aside, lost in zip(trajectory.transitions, side, unheard, strict=False):
        if lost or (aside and not keep_side):
            transition.metrics[PARSE_ERROR_MASKED_METRIC_KEY] = 1.0


def in_branch_order(transitions: Sequence[Transition], turns: Sequence[Turn]) -> list[Transition]:
    """Return transitions branch by branch, each without the part of its reply that no solver saw.

    Args:
        transitions: those of a trajectory, in time order.
        turns: the answered turns of its episode, in time order.

    Returns:
        The transitions, branch by branch in the order of their first turns; the branch of the
        last turn comes last, so that the transition that ended the episode stays last. A
        transition that belongs to no turn (a runner's own, without tokens) keeps its place
        among the first turns of branches.
    """
    branches: list[list[int]] = []
    open_ends: dict[int, list[int]] = {}
    result = list(transitions)
    for index, transition in enumerate(transitions):
        turn = turns[index] if index < len(turns) else None
        if turn is None or not _is_of(transition, turn):
            branches.append([index])
            continue
        result[index] = _seen(transition, turn)
        branch = open_ends.pop(id(turn.parent), None)
        if branch is None:
            branch = []
            branches.append(branch)
        branch.append(index)
        open_ends[id(turn)] = branch
    last = len(transitions) - 1
    branches.sort(key=lambda branch: branch[-1] == last)
    return [result[index] for branch in branches for index in branch]


def _is_of(transition: Transition, turn: Turn) -> bool:
    return transition.ob.length == turn.length and tuple(transition.ac.tokens) == turn.sampled


def _seen(transition: Transition, turn: Turn) -> Transition:
    """Drop tokens sampled after the end of a reply, which nothing that was scored depends on."""
    action = transition.ac
    if turn.kept == len(action.tokens):
        return transition
    logprobs = action.maybe_logprobs
    # Everything else stays, such as the sequence's id, which an asynchronous loss needs.
    kept = replace(
        action,
        tokens=action.tokens[: turn.kept],
        maybe_logprobs=None if logprobs is None else logprobs[: turn.kept],
    )
    return replace(transition, ac=kept)
