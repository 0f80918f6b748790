"""Samplers: which samples the next batch of a training has, given the rewards so far.

A training's sampler is made and tried here, with the files by which a killed run continues.

::

    DIR/sampler/<task>/state.jsonl                 what was learned from, and then chosen, per step
    DIR/sampler/<task>/outcomes/000012.00003.json  rewards of a group that were not learned from yet

The process of a group writes its rewards, with a rename, before the trainer gets them; so when a
checkpoint exists, those of all steps before it are there. The dataset's process learns from them
when it is asked for the next batch, and adds one line to the state. A run that continues at a step
keeps the lines before it.
"""

from __future__ import annotations

import json
import os
import platform
import random
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from heapq import nsmallest
from numbers import Integral
from pathlib import Path
from typing import Any

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.hooks import GroupOutcome, SamplePool, Sampler, SamplerSpec
from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.plugins.manager import build_from
from inspect_tinker_plugin.processes.journal import Journal

FOLDER = "sampler"
"""Name of the folder, in that of a dataset's logs."""

_HOOK = "inspect_rl_samplers"
_STATE = "state.jsonl"
_OUTCOME = re.compile(r"(\d+)\.(\d+)\.json")


def resolve_sampler(spec: SamplerSpec) -> Callable[[], Sampler]:
    """Turn what ``sampler=`` takes into a function that makes a new sampler, and try it.

    Args:
        spec: ``"curriculum(again=0.1)"``, or a function.

    Raises:
        ConfigError: An unknown name, a malformed expression, or something that makes no sampler.
    """
    return _resolve(spec)[0]


def try_sampler(spec: SamplerSpec, pool: SamplePool, *, count: int) -> None:
    """Have a new sampler choose a batch, learn from it and choose again, before anything runs.

    Args:
        spec: As for :func:`resolve_sampler`.
        pool: The samples of the training.
        count: Groups per batch.

    Raises:
        ConfigError: It failed, or chose something else; the message names its plugin.
    """
    make, origin = _resolve(spec)
    rewards = tuple(float(member % 2) for member in range(pool.group_size))
    with _naming(spec, origin):
        sampler = make()
        sampler.begin(pool)
        for step in range(2):
            for position in choose_positions(sampler, step, count, len(pool.samples)):
                sampler.learn(GroupOutcome(position=position, rewards=rewards, step=step))
        dict(sampler.figures())


@contextmanager
def _naming(spec: SamplerSpec, origin: str) -> Iterator[None]:
    """Name the sampler and its plugin in the error of what it did."""
    try:
        yield
    except (Exception, SystemExit) as error:
        problem = str(error)
        if not isinstance(error, ConfigError):
            problem = f"failed: {type(error).__name__}: {error}"
        raise ConfigError(f"sampler: {spec!r:.80}{origin}: {problem}") from error


def _resolve(spec: SamplerSpec) -> tuple[Callable[[], Sampler], str]:
    """Return what makes a sampler, and its plugin in words."""
    make: Callable[[], Sampler]
    if isinstance(spec, str):
        expression = spec
        origin = build_from(_HOOK, expression).origin

        def make() -> Sampler:
            made: Sampler = build_from(_HOOK, expression).value
            return made

    elif callable(spec):
        origin, make = "", spec
    else:
        raise ConfigError(
            f"sampler: {spec!r:.80} is neither an expression nor a function that makes a sampler"
        )
    if not isinstance(made := make(), Sampler):
        raise ConfigError(
            f"sampler: {spec!r:.80}{origin} makes {made!r:.80}, which is not a Sampler"
        )
    return make, origin


def choose_positions(sampler: Sampler, step: int, count: int, size: int) -> list[int]:
    """Return the positions of a step's samples."""
    chosen = list(sampler.choose(step, count))
    fits = all(isinstance(each, Integral) and 0 <= each < size for each in chosen)
    if len(chosen) != count or not fits:
        raise ConfigError(
            f"the sampler {type(sampler).__name__} chose {chosen!r:.80}, not {count} positions "
            f"below {size}"
        )
    return [int(position) for position in chosen]


@dataclass(frozen=True)
class OutcomeFile:
    """The place for the rewards of one group; picklable, and the same in every process."""

    path: Path
    position: int

    def check(self) -> None:
        """Find out, before a group begins, whether its rewards would reach the sampler."""
        folder = self.path.parents[1]
        if not (folder / _STATE).is_file():
            raise ConfigError(
                f"a sampler learns from rewards by its folder {folder}, which {platform.node()} "
                "does not have; share the folder of the logs with every machine that runs "
                "rollouts, or leave the sampler out"
            )

    def write(self, rewards: Sequence[float]) -> None:
        """Write the rewards, atomically."""
        temporary = self.path.with_name(f"{uuid.uuid4().hex}.writing")
        content = {"position": self.position, "rewards": [float(each) for each in rewards]}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)


class SamplerState:
    """A sampler with its files.

    Args:
        folder: The task's folder.
        spec: As for :func:`resolve_sampler`.
        pool: The samples.
        first_step: Step of the first batch; not 0 in a run that continues.
        logged: Returns outcomes from logs, for a run that begins.
    """

    def __init__(
        self,
        folder: Path,
        spec: SamplerSpec,
        pool: SamplePool,
        *,
        first_step: int = 0,
        logged: Callable[[], Sequence[GroupOutcome]] = list,
    ) -> None:
        make, origin = _resolve(spec)
        self._named = partial(_naming, spec, origin)
        with self._named():
            self.sampler = make()
            self.sampler.begin(pool)
        self._size = len(pool.samples)
        self._journal = Journal(folder / _STATE)
        self._outcomes = folder / "outcomes"
        self._chosen: dict[int, list[int]] = {}
        self._known: set[tuple[int, int]] = set()
        """Step and index of the groups that were learned from."""
        self.last_step = first_step
        try:
            self._outcomes.mkdir(parents=True, exist_ok=True)
            self._open(first_step, logged)
        except OSError as error:
            raise ConfigError(
                f"the state of the sampler cannot be written ({error}); name another log_dir"
            ) from error

    def choose(self, step: int, count: int) -> list[int]:
        """Return the positions of a step's samples; the same ones if it is asked again."""
        if step in self._chosen:
            return self._chosen[step]
        learned = [each for each in self._waiting() if each[:2] not in self._known]
        self._learn(learned)
        with self._named():
            chosen = choose_positions(self.sampler, step, count, self._size)
            figures = dict(self.sampler.figures())
        line = {"step": step, "learned": learned, "chosen": chosen}
        self._journal.write({**line, "figures": figures})
        for number, index, *_ in learned:
            self._outcome(number, index).unlink(missing_ok=True)
        self._chosen[step] = chosen
        self.last_step = max(step, self.last_step)
        return chosen

    def rolled_out(self, step: int) -> bool:
        """Whether a group of a step has ended."""
        known = self._known | {each[:2] for each in self._waiting()}
        return any(each == step for each, _ in known)

    def outcome_file(self, step: int, index: int, position: int) -> OutcomeFile:
        """Return the place for the rewards of a group."""
        return OutcomeFile(self._outcome(step, index), position)

    def _open(self, first_step: int, logged: Callable[[], Sequence[GroupOutcome]]) -> None:
        """Learn again what was learned before a step, and forget what came after it."""
        lines = self._journal.load() if first_step else []
        if lines and lines[0].get("samples") == self._size:
            head = lines[0]
        elif lines and "samples" in lines[0]:
            raise ConfigError(
                f"{self._journal.path} is of {counted(lines[0]['samples'], 'sample')}, and there "
                f"are {self._size}; choose another log_dir, or the same samples"
            )
        else:
            head = {
                "samples": self._size,
                "logged": [[each.position, list(each.rewards)] for each in logged()],
            }
        for position, rewards in head["logged"]:
            with self._named():
                self.sampler.learn(GroupOutcome(position=position, rewards=tuple(rewards)))
        kept, late = [], []
        for line in lines[1:]:
            if line["step"] < first_step:
                kept.append(line)
                self._learn(line["learned"])
                self._chosen[line["step"]] = line["chosen"]
            else:
                late += [each for each in line["learned"] if each[0] < first_step]
        # What a dropped line had learned from earlier steps waits again, before the line is gone.
        for step, index, position, rewards in late:
            self.outcome_file(step, index, position).write(rewards)
        for path in list(self._outcomes.iterdir()):
            match = _OUTCOME.fullmatch(path.name)
            if match is None or int(match[1]) >= first_step:
                path.unlink(missing_ok=True)
        self._journal.replace([head, *kept])

    def _learn(self, learned: Sequence[Sequence[Any]]) -> None:
        for step, index, position, rewards in learned:
            self._known.add((step, index))
            outcome = GroupOutcome(position=position, rewards=tuple(rewards), step=step)
            with self._named():
                self.sampler.learn(outcome)

    def _waiting(self) -> list[tuple[int, int, int, list[float]]]:
        """Return step, index, position and rewards of the groups that wait, in this order."""
        found = []
        for path in self._outcomes.iterdir():
            if match := _OUTCOME.fullmatch(path.name):
                content = json.loads(path.read_text(encoding="utf-8"))
                key = int(match[1]), int(match[2])
                found.append((*key, content["position"], content["rewards"]))
        return sorted(found)

    def _outcome(self, step: int, index: int) -> Path:
        return self._outcomes / f"{step:06d}.{index:05d}.json"


class Curriculum(Sampler):
    """Prefers samples whose last group had different rewards: only these teach anything.

    Each sample has a weight, its chance to be chosen relative to others: 1 after a group whose
    rewards differed; before its first group the share of samples whose first group had a
    difference; and after groups in a row whose rewards were all equal that share times ``again``
    for each of them, so that such samples come back rarely, and ever more so. Samples below 1 are
    scaled down where they are so many that they would get more than that share of the choices:
    otherwise the untried ones of a large dataset would crowd out the few that are known to be
    useful. A batch has no sample twice unless there are too few.

    Args:
        again: What one more group without a difference multiplies a weight by, from 0 to 1.
        least: What groups without a difference multiply a weight by at least, above 0, so that no
            sample is lost.

    Raises:
        ValueError: A number is out of its range.
    """

    def __init__(self, again: float = 0.25, least: float = 0.02) -> None:
        if not 0 <= again <= 1:
            raise ValueError(f"again is a number from 0 to 1, not {again!r}")
        if not 0 < least <= 1:
            raise ValueError(f"least is a number above 0, up to 1, not {least!r}")
        self._again = again
        self._least = least

    def begin(self, pool: SamplePool, /) -> None:
        """Start with every sample untried."""
        self._pool = pool
        self._even: dict[int, float] = {}
        """By position of a tried sample, its groups in a row without a difference."""
        self._level: dict[int, float] = {}
        """By position of a tried sample, the mean reward of its last group."""
        self._first: dict[int, float] = {}
        """By position of a tried sample, how much of its first group is known: all, except from
        logs with fewer attempts."""
        self._mixed = 0.0
        """Of these first groups, those with a difference."""

    def learn(self, outcome: GroupOutcome, /) -> None:
        """Put a sample into another pool; attempts of a log count as the groups they would make."""
        rewards = outcome.rewards
        if not rewards:
            return
        groups = 1.0 if outcome.step is not None else len(rewards) / self._pool.group_size
        differ = min(rewards) < max(rewards)
        before = self._even.get(outcome.position, 0.0)
        self._even[outcome.position] = 0.0 if differ else before + groups
        self._level[outcome.position] = sum(rewards) / len(rewards)
        known = self._first.get(outcome.position, 0.0)
        self._first[outcome.position] = min(1.0, known + groups)
        self._mixed += self._first[outcome.position] - known if differ else 0.0

    def choose(self, step: int, count: int, /) -> list[int]:
        """Draw samples by their weights, with a generator of this step alone."""
        generator = random.Random(f"{self._pool.seed}/{self._pool.task}/{step}")
        weights = self.weights()
        # The least of exponential times are a draw without replacement (Efraimidis, Spirakis).
        keys = [generator.expovariate(weight) for weight in weights]
        chosen: list[int] = []
        while len(chosen) < count:
            chosen += nsmallest(count - len(chosen), range(len(keys)), key=keys.__getitem__)
        return chosen

    def weights(self) -> list[float]:
        """Return the weight of each sample."""
        share = (self._mixed + 1) / (sum(self._first.values()) + 1)
        weights = [self._weight(position, share) for position in range(len(self._pool.samples))]
        useful = sum(weight == 1 for weight in weights)
        others = sum(weights) - useful
        if not useful or others * (1 - share) <= useful * share:
            return weights
        scale = useful * share / (1 - share) / others
        return [weight if weight == 1 else weight * scale for weight in weights]

    def _weight(self, position: int, share: float) -> float:
        even = self._even.get(position)
        if even is None:
            return share
        return share * max(self._least, self._again**even) if even else 1.0

    def figures(self) -> Mapping[str, float]:
        """Return how many samples are untried, useful, too easy and too hard."""
        resting = [position for position, even in self._even.items() if even]
        low, high = min(self._level.values(), default=0.0), max(self._level.values(), default=0.0)
        easy = sum(self._level[position] > (low + high) / 2 for position in resting)
        return {
            "untried": len(self._pool.samples) - len(self._even),
            "useful": len(self._even) - len(resting),
            "easy": easy,
            "hard": len(resting) - easy,
        }


SAMPLERS: Mapping[str, Callable[..., Sampler]] = {"curriculum": Curriculum}
"""Built-in samplers by name."""
