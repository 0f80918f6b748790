"""One rollout in a log: Inspect's own record, and what training did with it."""

from __future__ import annotations

import base64
import struct
import traceback
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inspect_ai.dataset import Sample
from inspect_ai.log import (
    EvalError,
    EvalLog,
    EvalSample,
    EvalSampleSummary,
    read_eval_log,
    read_eval_log_sample,
    read_eval_log_sample_summaries,
)
from inspect_ai.scorer import Score
from inspect_ai.solver import Choice

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.episodes import Metrics
from inspect_tinker_plugin.contracts.errors import EpisodeError
from inspect_tinker_plugin.contracts.wording import spell_out
from inspect_tinker_plugin.logs.staging import GroupSlot

if TYPE_CHECKING:
    from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition

SAMPLED_KEY = "inspect_rl_sampled"
"""Key of a record's store under which the sampled tokens are."""

METADATA_KEY = "inspect_rl"
"""Key of a sample's metadata that holds the training's figures."""

_IN_SUMMARY = 1024
"""Maximum characters of an entry of metadata that Inspect keeps in the summaries of a log."""

_TOKEN = "i"
_LOGPROB = "d"
_OF_SERVER = ("sequence_id", "prompt_cache_hit_tokens")
"""What the server says of an action beside its tokens (cookbook 0.6); a loss may need the id."""


class RolloutStatus(StrEnum):
    """What happened to a rollout."""

    GRADED = "graded"
    """It was returned to the trainer with its reward."""
    DROPPED = "dropped"
    """It ended well, but its group failed or did not need it."""
    FAILED = "failed"
    """It failed, and its exception was raised to the trainer (which may have retried)."""
    CUT = "cut"
    """It was stopped from outside: cancelled, or the sampler failed."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One member of a group after its end."""

    sample: Sample
    """The sample, with its id."""

    epoch: int
    """Number of the rollout in its group, from 1; retries continue the numbering."""

    status: RolloutStatus
    """What happened to it."""

    build: Callable[[], EvalSample | None]
    """Builds Inspect's record; ``None`` when there is nothing but the sample."""

    reward: float | None = None
    """Sum of all rewards that the trainer received; absent when it received none."""

    stop_reason: str | None = None
    """Why it ended, in the cookbook's words."""

    error: EpisodeError | None = None
    """What failed."""

    metrics: Metrics = field(default_factory=dict)
    """Figures of the rollout: ``turns``, ``tokens/...``, ``time/...``."""

    reward_metrics: Collection[str] = ()
    """Names of the metrics that belong to the reward."""

    choices: Sequence[Choice] = ()
    """The sample's choices as the solver left them; Inspect's record has only their texts."""

    sampled: Callable[[], Mapping[str, Any] | None] = lambda: None
    """Returns what to keep of the sampled tokens (:func:`record_trajectory`)."""


def eval_sample(rollout: Rollout, slot: GroupSlot) -> EvalSample:
    """Build the record of a rollout; if that fails, a record that says so."""
    try:
        record = rollout.build()
        problem = None
    except Exception as error:
        record = None
        problem = _eval_error(error, f"the record of this rollout could not be built: {error!r}")
    record = _bare(rollout) if record is None else _correct_end(record)
    record.error = record.error or _failure(rollout) or problem
    taken = record.metadata
    record.metadata = {**taken, **_entries(_figures_key(taken), _figures(rollout, slot))}
    if (kept := rollout.sampled()) is not None:
        record.store = {**record.store, SAMPLED_KEY: kept}
    return record


def free_name(name: str, taken: Container[str]) -> str:
    """Return ``name``, or a variation of it that is not taken."""
    while name in taken:
        name = f"rl_{name}"
    return name


def figures(record: EvalSample | EvalSampleSummary) -> dict[str, Any]:
    """Return what :func:`eval_sample` put into a record's metadata; empty for other records."""
    whole, *parts = [record.metadata[key] for key in _figures_keys(record)] or [None]
    if isinstance(whole, Mapping):
        return dict(whole)
    found: dict[str, Any] = {}
    for part in parts:
        if isinstance(part, Mapping):  # unless a metric has a name of 1 kB
            metrics = {**found.get("metrics", {}), **part["metrics"]}
            of_reward = [*found.get("reward_metrics", ()), *part["reward_metrics"]]
            found |= {**part, "metrics": metrics, "reward_metrics": of_reward}
    return found


def note(record: EvalSample, name: str, value: Any) -> None:
    """Add to what :func:`figures` returns for a record."""
    if keys := _figures_keys(record):
        seen = {**figures(record), name: value}
        record.metadata = {**own_metadata(record), **_entries(keys[0], seen)}


def own_metadata(record: EvalSample) -> dict[str, Any]:
    """Return a record's metadata as the task left it, without the figures."""
    keys = _figures_keys(record)
    return {name: value for name, value in record.metadata.items() if name not in keys}


def own_scores(log: EvalLog, record: EvalSample) -> dict[str, Score]:
    """Return a rollout's scores without the reward, which is the headline of its log."""
    headline = log.eval.headline_metric
    reward = None if headline is None else headline.scorer
    return {name: score for name, score in (record.scores or {}).items() if name != reward}


def _figures_key(taken: Collection[str]) -> str:
    """Return the key for figures: longer than those of the task's that are like it."""
    longest = max((len(key) for key in taken if METADATA_KEY in key), default=0)
    key = METADATA_KEY
    while len(key) <= longest:
        key = f"rl_{key}"
    return key


def _figures_keys(record: EvalSample | EvalSampleSummary) -> list[str]:
    """Return the keys of a record's metadata that hold figures: of the whole, and of its parts."""
    found = [key for key in record.metadata if key.endswith(METADATA_KEY)]
    keys = [max(found, key=len)] if found else []
    while keys and (following := f"{keys[0]}_{len(keys)}") in record.metadata:
        keys.append(following)
    return keys


def _entries(key: str, seen: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures as entries of metadata.

    Those that are too long for a log's summaries are there once more in parts, metric by metric,
    under ``key_1`` and so on.
    """
    if len(internals.to_json_safe(seen)) <= _IN_SUMMARY:
        return {key: seen}
    of_reward = frozenset(seen["reward_metrics"])
    first = {**seen, "metrics": {}, "reward_metrics": [], "choices": []}
    parts, size = [first], len(internals.to_json_safe(first))
    for name, value in sorted(seen["metrics"].items()):
        added = 2 * len(repr(name)) + len(repr(value)) + 20  # with the blanks of both lists
        if (size := size + added) > _IN_SUMMARY:
            parts.append({"metrics": {}, "reward_metrics": []})
            size = 50 + added
        parts[-1]["metrics"][name] = value
        if name in of_reward:
            parts[-1]["reward_metrics"].append(name)
    return {key: seen} | {f"{key}_{n}": each for n, each in enumerate(parts, 1)}


def _bare(rollout: Rollout) -> EvalSample:
    sample = rollout.sample
    assert sample.id is not None
    return EvalSample(
        id=sample.id,
        epoch=rollout.epoch,
        input=sample.input,
        choices=sample.choices,
        target=sample.target,
        metadata=dict(sample.metadata or {}),
    )


def _correct_end(record: EvalSample) -> EvalSample:
    """Correct a record's end time: its group may have ended long after its last event."""
    last = record.events[-1].timestamp if record.events else None
    if last is None or record.completed_at is None:
        return record
    completed = type(last).fromisoformat(record.completed_at)
    waited = max(0.0, (completed - last).total_seconds())
    record.completed_at = last.isoformat()
    for name in ("total_time", "working_time"):
        seconds = getattr(record, name)
        if seconds is not None:
            setattr(record, name, round(max(0.0, seconds - waited), 3))
    return record


def _failure(rollout: Rollout) -> EvalError | None:
    if rollout.error is not None:
        return _eval_error(rollout.error, str(rollout.error))
    if rollout.status is not RolloutStatus.CUT:
        return None
    return EvalError(
        message="The rollout was stopped before its episode ended: the group was "
        "given up, the rollout timed out, or sampling failed. The training log says which.",
        traceback="",
        traceback_ansi="",
    )


def _eval_error(error: BaseException, message: str) -> EvalError:
    text = spell_out("".join(traceback.format_exception(error)))
    return EvalError(message=spell_out(message), traceback=text, traceback_ansi=text)


def _figures(rollout: Rollout, slot: GroupSlot) -> dict[str, Any]:
    """Return the training's figures; short, so that a log's sample list can show them."""
    tokens = {
        name.removeprefix("tokens/"): value
        for name, value in rollout.metrics.items()
        if name.startswith("tokens/")
    }
    return {
        "batch": slot.batch if slot.step_known else None,
        "group": slot.index if slot.step_known else None,
        "reward": rollout.reward,
        "status": str(rollout.status),
        "stop_reason": rollout.stop_reason,
        "error_cause": None if rollout.error is None else str(rollout.error.cause),
        "turns": rollout.metrics.get("turns"),
        "datums": tokens.pop("segments", None),
        "tokens": tokens,
        "metrics": {
            name: value
            for name, value in rollout.metrics.items()
            if name != "turns" and not name.startswith("tokens/")
        },
        "reward_metrics": sorted(rollout.reward_metrics),
        "choices": [asdict(choice) for choice in rollout.choices],
    }


def logged_choices(record: EvalSample) -> list[Choice]:
    """Return the choices of a logged rollout as its solver left them, in its order and marked."""
    return [Choice(**each) for each in figures(record).get("choices") or ()]


def record_trajectory(trajectory: Trajectory, reward: float) -> dict[str, Any] | None:
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
                "metrics": _of_step(transition, last=transition is trajectory.transitions[-1]),
            }
        )
        before = [*prompt, *action.tokens]
    return {"steps": steps, "reward": reward, "stop_reason": trajectory.stop_reason}


def _of_step(transition: Transition, *, last: bool) -> Metrics:
    """Return a step's metrics; of the last only its mask, as its others are the rollout's."""
    if not last:
        return transition.metrics
    from tinker_cookbook.rl.types import PARSE_ERROR_MASKED_METRIC_KEY as MASK

    return {MASK: transition.metrics[MASK]} if MASK in transition.metrics else {}


def is_masked(transition: Transition) -> bool:
    """Whether a step has no sampled token that is trained on."""
    from tinker_cookbook.rl.types import PARSE_ERROR_MASKED_METRIC_KEY

    return not transition.ac.tokens or PARSE_ERROR_MASKED_METRIC_KEY in transition.metrics


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
                metrics=dict(step["metrics"]),
            )
        )
        before = [*prompt, *tokens]
    return Trajectory(transitions, tinker.ModelInput.empty(), kept["stop_reason"])


def read_group(log: Path, group: int) -> list[EvalSample]:
    """Read the rollouts of one group of a batch's log, in the order of their epochs.

    The records are as the group left them, to be written to another log.
    """
    header, path = read_eval_log(str(log), header_only=True), str(log)
    records = [
        read_eval_log_sample(path, each.id, each.epoch)
        for each in read_eval_log_sample_summaries(path)
        if figures(each).get("group") == group
    ]
    for record in records:
        record.scores = own_scores(header, record) or None
    return sorted(records, key=lambda record: record.epoch)


def rebuild_group(
    group: Iterable[EvalSample],
) -> tuple[list[Trajectory], list[tuple[float, Metrics]]] | None:
    """Return what the trainer received of a logged group: trajectories, group rewards and metrics.

    Returns:
        ``None`` when the log does not keep all of it (images).
    """
    graded = [each for each in group if figures(each).get("status") == RolloutStatus.GRADED]
    made = [trajectory(each) for each in graded]
    whole = [each for each in made if each is not None]
    if not whole or len(whole) < len(made):
        return None
    return whole, [(each.store[SAMPLED_KEY]["reward"], _metrics(figures(each))) for each in graded]


def _metrics(seen: Mapping[str, Any]) -> Metrics:
    """Return the metrics that :func:`_figures` has sorted."""
    tokens = {"segments": seen["datums"], **seen["tokens"]}
    of_tokens = {f"tokens/{name}": value for name, value in tokens.items()}
    return {"turns": seen["turns"], **seen["metrics"], **of_tokens}


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
        of which the log does not keep all rollouts (images) are left out.
    """
    from tinker_cookbook.rl.types import TrajectoryGroup

    groups: dict[int, list[EvalSample]] = {}
    for record in records:
        seen = figures(record)
        if seen.get("status") == RolloutStatus.GRADED:
            groups.setdefault(seen["group"], []).append(record)
    made = []
    for _, members in sorted(groups.items()):
        if (given := rebuild_group(sorted(members, key=lambda record: record.epoch))) is not None:
            trajectories, paid = given
            rewards, metrics = [each for each, _ in paid], [each for _, each in paid]
            made.append(TrajectoryGroup(trajectories, rewards, metrics))
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
