"""Keeps in a log what was sampled, so that the datums of a training can be made from its logs.

A record's store has the steps of its trajectory as the trainer got it, under ``SAMPLED_KEY``: of
each step the tokens of the prompt that the step before did not have, the sampled tokens with their
log probabilities and the id that the server gave them. Numbers are kept to the last bit.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from inspect_ai.log import EvalSample

from inspect_tinker_plugin.logs.rollout import SAMPLED_KEY, RolloutStatus, figures

if TYPE_CHECKING:
    from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup

_TOKEN = "i"
_LOGPROB = "d"
_OF_SERVER = ("sequence_id", "prompt_cache_hit_tokens")
"""What the server says of an action beside its tokens (cookbook 0.6); a loss may need the id."""


def sampled(trajectory: Trajectory, reward: float) -> dict[str, Any] | None:
    """Return what a log keeps of a trajectory; ``None`` for one with images.

    Args:
        trajectory: The steps in the order in which the trainer got them.
        reward: The group's part of the reward, which the steps do not have.
    """
    steps: list[dict[str, Any]] = []
    before: list[int] = []
    for transition in trajectory.transitions:
        prompt = _tokens(transition.ob.chunks)
        if prompt is None:
            return None
        kept = len(before) if prompt[: len(before)] == before else 0
        action = transition.ac
        steps.append(
            {
                "kept": kept,
                "prompt": _pack(prompt[kept:], _TOKEN),
                "tokens": _pack(action.tokens, _TOKEN),
                "logprobs": (
                    None
                    if action.maybe_logprobs is None
                    else _pack(action.maybe_logprobs, _LOGPROB)
                ),
                "stop_reason": action.stop_reason,
                **{name: value for name in _OF_SERVER if (value := getattr(action, name, None))},
                "reward": transition.reward,
                "episode_done": transition.episode_done,
            }
        )
        before = [*prompt, *action.tokens]
    return {"steps": steps, "reward": reward, "stop_reason": trajectory.stop_reason}


def trajectory(record: EvalSample) -> Trajectory | None:
    """Make the trajectory of a logged rollout again; ``None`` when the log does not keep it."""
    import tinker
    from tinker_cookbook.completers import TokensWithLogprobs
    from tinker_cookbook.rl.types import Trajectory, Transition

    kept = record.store.get(SAMPLED_KEY)
    if not isinstance(kept, Mapping):
        return None
    transitions = []
    before: list[int] = []
    known = {field.name for field in fields(TokensWithLogprobs)}
    for step in kept["steps"]:
        said = {name: step[name] for name in _OF_SERVER if name in known and name in step}
        prompt = [*before[: step["kept"]], *_unpack(step["prompt"], _TOKEN)]
        tokens = _unpack(step["tokens"], _TOKEN)
        logprobs = None if step["logprobs"] is None else _unpack(step["logprobs"], _LOGPROB)
        transitions.append(
            Transition(
                ob=tinker.ModelInput.from_ints(prompt),
                ac=TokensWithLogprobs(tokens, logprobs, step["stop_reason"], **said),
                reward=step["reward"],
                episode_done=step["episode_done"],
            )
        )
        before = [*prompt, *tokens]
    return Trajectory(transitions, tinker.ModelInput.empty(), kept["stop_reason"])


def repay(record: EvalSample, *, last: float | None, group: float) -> float | None:
    """Replace what a logged rollout was paid, and leave what it was paid for single turns.

    Args:
        record: The rollout; changed in place.
        last: The reward of the step that ended the episode; ``None`` leaves it as it was.
        group: The group's part of the reward; to it is added what the last step cannot be paid,
            as the trainer never got that step.

    Returns:
        The sum of all rewards; ``None`` when the log does not keep what was sampled.
    """
    kept = record.store.get(SAMPLED_KEY)
    if not isinstance(kept, Mapping):
        return None
    steps = [dict(step) for step in kept["steps"]]
    final = next((step for step in steps if step["episode_done"]), None)
    if last is not None:
        if final is None:
            group += last
        else:
            final["reward"] = last
    record.store = {**record.store, SAMPLED_KEY: {**kept, "steps": steps, "reward": group}}
    return float(sum(step["reward"] for step in steps) + group)


def trajectory_groups(records: Iterable[EvalSample]) -> list[TrajectoryGroup]:
    """Make the groups of a batch again, for the cookbook's ``assemble_training_data``.

    Args:
        records: The samples of one log of rollouts, with their stores.

    Returns:
        The groups in their order, each with the rollouts that went back to the trainer. Groups
        of which the log does not keep all rollouts (images; logs of an earlier release) are left
        out.
    """
    from tinker_cookbook.rl.types import TrajectoryGroup

    groups: dict[int, list[EvalSample]] = {}
    for record in records:
        seen = figures(record)
        if seen.get("status") == RolloutStatus.GRADED:
            groups.setdefault(seen["group"], []).append(record)
    made = []
    for _, members in sorted(groups.items()):
        members.sort(key=lambda record: record.epoch)
        trajectories = [each for member in members if (each := trajectory(member)) is not None]
        if len(trajectories) == len(members):
            rewards = [member.store[SAMPLED_KEY]["reward"] for member in members]
            made.append(TrajectoryGroup(trajectories, rewards, [{} for _ in members]))
    return made


def _tokens(chunks: Sequence[Any]) -> list[int] | None:
    tokens: list[int] = []
    for chunk in chunks:
        if not hasattr(chunk, "tokens"):
            return None
        tokens += chunk.tokens
    return tokens


def _pack(numbers: Sequence[float], kind: str) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}{kind}", *numbers)).decode()


def _unpack(text: str, kind: str) -> list[Any]:
    packed = base64.b64decode(text)
    return list(struct.unpack(f"<{len(packed) // struct.calcsize(kind)}{kind}", packed))
