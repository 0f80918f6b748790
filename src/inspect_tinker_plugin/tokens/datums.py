"""The order in which the trainer gets the transitions of an episode.

The cookbook joins a transition to the one before it when its prompt begins with that whole
sequence. A solver that runs several conversations at once interleaves their turns, so no turn
would follow its own. Transitions are ordered so that each branch of the episode is one datum;
sums over a trajectory do not depend on the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tinker_cookbook.rl.types import PARSE_ERROR_MASKED_METRIC_KEY, Trajectory, Transition

from inspect_tinker_plugin.tokens.continuation import Turn


def arrange(trajectory: Trajectory, turns: Sequence[Turn]) -> None:
    """Put the transitions of a trajectory in branch order, in place."""
    trajectory.transitions[:] = in_branch_order(trajectory.transitions, turns)


def leave_out(trajectory: Trajectory, side: Sequence[bool], unheard: Sequence[bool]) -> None:
    """Mark turns that are not trained on, with the mark for those whose calls cannot be read.

    A program that asks for no model under the policy's own name has no main line to keep, and all
    its turns stay.
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
        result[index] = _drop_unseen(transition, turn)
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


def _drop_unseen(transition: Transition, turn: Turn) -> Transition:
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
