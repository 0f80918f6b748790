"""Runs groups of episodes with a fault in each, and checks the results and what is left behind."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from tests.faults.campaign import ground
from tests.faults.campaign.folder import PROVIDER
from tests.faults.campaign.plan import CAUSES, Case, Running, draw, running_cases

from inspect_tinker_plugin.contracts.errors import EpisodeError
from inspect_tinker_plugin.episode.runner import _running as running_episodes
from inspect_tinker_plugin.episode.sandbox import sandbox_places
from inspect_tinker_plugin.rl.hooks import Observers

if TYPE_CHECKING:
    import tinker
    from tinker_cookbook.completers import StopCondition, TokensWithLogprobs
    from tinker_cookbook.rl.rollout_strategy import RolloutStrategy
    from tinker_cookbook.rl.types import TrajectoryGroup

PENALTY = -1.0
GROUP_PATIENCE = 120.0
"""Seconds after which a group counts as hung; far beyond every time-out below."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a campaign is run."""

    episodes: int = 10_000
    """Episodes with a fault; retries come on top."""

    group_size: int = 2
    """Episodes per group."""

    seed: int = 0
    """What the faults are drawn from."""

    at_once: int = 64
    """Groups that run at once."""

    places: int = 48
    """``max_sandboxes``: fewer than the concurrent agents may want."""

    patience: float = 8.0
    """Seconds that a rollout may take before it is timed out."""

    only: int | None = None
    """Run this case alone."""

    log_dir: Path | None = None
    """Folder for ``.eval`` logs, if any are written."""


@dataclass
class Report:
    """The result of a campaign."""

    settings: Settings
    episodes: int = 0
    """Episodes that were given a fault."""

    struck: int = 0
    """Those whose fault occurred."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """Rollouts by outcome."""

    faults: Counter[str] = field(default_factory=Counter)
    """Faults that occurred, by kind and point."""

    wrong: list[str] = field(default_factory=list)
    """What must not happen, with how to reproduce it."""

    left: list[str] = field(default_factory=list)
    """What was left at the end."""

    @property
    def passed(self) -> bool:
        """Whether nothing went wrong except the faults."""
        return not self.wrong and not self.left


async def run_campaign(
    settings: Settings, *, progress: Callable[[int], None] = lambda done: None
) -> Report:
    """Run a campaign.

    Args:
        settings: How.
        progress: Called with the number of finished episodes.
    """
    report = Report(settings)
    count = settings.episodes // settings.group_size
    numbers = range(count) if settings.only is None else [settings.only]
    with _short_waits() as folder:
        campaign = _Campaign(settings, report, count)
        asyncio.get_running_loop().set_exception_handler(campaign.complain)
        await campaign.warm_up()
        before = _Footprint.take(folder)
        gate = asyncio.Semaphore(settings.at_once)

        async def guarded(number: int) -> None:
            async with gate:
                await campaign.run_case(draw(settings.seed, number, settings.group_size))
                report.episodes += settings.group_size
                progress(report.episodes)

        await asyncio.gather(*[guarded(number) for number in numbers])
        report.left = await before.compare()
    return report


class _Campaign:
    def __init__(self, settings: Settings, report: Report, cases: int) -> None:
        self._settings = settings
        self._report = report
        self._cases = max(cases, (settings.only or 0) + 1)
        self._dataset = cache(self._make_dataset)

    async def warm_up(self) -> None:
        """Load what the first rollouts of a process load, before time-outs count."""
        from tinker_cookbook.rl.rollouts import do_group_rollout

        if self._settings.log_dir is not None:  # every dataset holds a lock of its log folder
            for kind in product((False, True), repeat=3):
                self._dataset(*kind)
        for agent in (False, True):
            [builder] = self._dataset(agent, True, True).get_batch(0)
            await do_group_rollout(builder, _policy())

    async def run_case(self, case: Case) -> None:
        """Run one group, and check its results."""
        from tinker_cookbook.exceptions import AllTrajectoriesFailedError
        from tinker_cookbook.rl.rollouts import do_group_rollout

        running = running_cases[case.number] = Running(case)
        dataset = self._dataset(case.agent, case.priced, case.runner_times)
        [builder] = dataset.get_batch(case.number)
        strategy = _strategy(case, self._settings.patience)
        group = running.group = asyncio.create_task(
            do_group_rollout(builder, _policy(), strategy=strategy), name=f"case {case.number}"
        )
        await asyncio.wait([group], timeout=GROUP_PATIENCE)
        outcomes = self._report.outcomes
        if not group.done():
            self._wrong(case, f"it hangs: {group.get_stack(limit=1)}")
            group.cancel()
        elif group.cancelled():
            outcomes["killed"] += len(case.faults)
            if not any(running.fault(e).kind == "kill" for e in running.struck):  # type: ignore[union-attr]
                self._wrong(case, "it was cancelled, and nobody did")
        elif (error := group.exception()) is None:
            self._judge(running, group.result())
        elif isinstance(error, EpisodeError):
            outcomes[f"raised: {error.cause}"] += len(case.faults)
            self._check_causes(running, [error.cause])
        elif isinstance(error, AllTrajectoriesFailedError):
            outcomes["dropped by MinViableGroup"] += len(case.faults)
        elif isinstance(error, TimeoutError) and case.strategy == "RetryOnFailure":
            outcomes["timed out by RetryOnFailure"] += len(case.faults)
        else:
            self._wrong(case, f"it raised {error!r}")
        del running_cases[case.number]
        self._report.struck += len(running.struck)
        for epoch in running.struck:
            self._report.faults[str(running.fault(epoch))] += 1

    def complain(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Record what the event loop reports, except for rollouts abandoned by the cookbook."""
        if not isinstance(context.get("future"), asyncio.Task):
            self._report.wrong.append(f"the event loop reports {context}")

    def _check_causes(self, running: Running, causes: Sequence[str]) -> None:
        """Check that a failure is attributed to the part that was struck, or to its time."""
        case = running.case
        allowed = {"unscored", "sandbox"} if case.agent else {"unscored"}
        if running.late:  # attributed to the part that ran when time was up
            self._report.outcomes["of them, not ended in time"] += len(causes)
            allowed |= {"solver", "scorer", "sandbox"}
        for epoch in running.struck:
            fault = running.fault(epoch)
            allowed |= CAUSES[fault.point] if fault is not None else set()
        if not set(causes) <= allowed:
            self._wrong(case, f"causes {list(causes)}, not {sorted(allowed)}")

    def _judge(self, running: Running, group: TrajectoryGroup) -> None:
        case = running.case
        clean = ground.clean_reward(case.number)
        for trajectory, total, of_group in zip(
            group.trajectories_G, group.get_total_rewards(), group.metrics_G, strict=True
        ):
            metrics: dict[str, Any] = dict(of_group)
            for transition in trajectory.transitions:
                metrics.update(transition.metrics)
            causes = sorted(k.removeprefix("error/") for k in metrics if k.startswith("error/"))
            # faults that the policy can provoke in its sandbox have penalty zero, and say so
            expected = PENALTY if case.priced else 0.0 if causes == ["inside_sandbox"] else None
            if causes and total == expected:
                self._report.outcomes[f"priced: {', '.join(causes)}"] += 1
                self._check_causes(running, causes)
            elif not causes and total == clean:
                self._report.outcomes["clean reward"] += 1
            else:
                self._wrong(case, f"the reward is {total}, not {clean}; causes {causes}")

    def _wrong(self, case: Case, what: str) -> None:
        faults = "; ".join(str(fault) for fault in case.faults)
        settings = self._settings
        self._report.wrong.append(
            f"case {case.number} ({'agent' if case.agent else 'question'}, {case.strategy}; "
            f"{faults}): {what}. Again: --seed {settings.seed} --only {case.number}"
        )

    def _make_dataset(self, agent: bool, priced: bool, runner_times: bool) -> Any:
        from tinker_cookbook.rl.rollout_limits import RolloutLimits

        from inspect_tinker_plugin.options import DatasetOptions
        from inspect_tinker_plugin.rewards import resolve_reward
        from inspect_tinker_plugin.rl.dataset import build_dataset
        from inspect_tinker_plugin.testing.policy import load_renderer

        settings = self._settings
        options = DatasetOptions(
            group_size=settings.group_size,
            reward=resolve_reward(ground.reward, timeout=settings.patience),
            on_error=PENALTY if priced else "raise",
            rollout_limits=RolloutLimits(rollout_timeout_seconds=settings.patience)
            if runner_times
            else None,
            stop_timeout=settings.patience / 2,
            max_sandboxes=settings.places,
            log_dir=settings.log_dir,
        )
        with patch(
            "inspect_tinker_plugin.rl.task_handle.episode_observers",
            lambda *args, **kwargs: Observers([ground.Watching()]),
        ):
            return build_dataset(ground.make_task(agent, self._cases), load_renderer(), options)


def _strategy(case: Case, patience: float) -> RolloutStrategy:
    from tinker_cookbook.rl.rollout_strategy import FailFast, MinViableGroup, RetryOnFailure

    timed = 0.0 if case.runner_times else patience
    match case.strategy:
        case "RetryOnFailure":
            return RetryOnFailure(max_retries=1, per_rollout_timeout=timed)
        case "MinViableGroup":
            return MinViableGroup(
                min_successful=1, max_retries=1, per_rollout_timeout=timed or None
            )
        case _:
            return FailFast()


@cache
def _policy() -> Any:
    """Make a policy that answers every case, after a look when there is something to look at."""
    import re

    from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs

    from inspect_tinker_plugin.testing.policy import load_tokenizer

    tokenizer = load_tokenizer()
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'

    class Answers(TokenCompleter):
        async def __call__(
            self,
            model_input: tinker.ModelInput,
            stop: StopCondition,
            *,
            max_tokens: int | None = None,
        ) -> TokensWithLogprobs:
            prompt = str(tokenizer.decode(model_input.to_ints()))
            number = re.search(r"This is case (\d+)", prompt)
            assert number is not None
            looks = '"look"' in prompt and "<tool_response>" not in prompt
            text = call if looks else ground.answer(int(number[1]))
            await asyncio.sleep(0)
            tokens = tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)
            return TokensWithLogprobs(tokens=list(tokens), maybe_logprobs=[0.0] * len(tokens))

    return Answers()


@contextmanager
def _short_waits() -> Iterator[str]:
    """Shorten all waits of seconds or minutes, and do not log each fault.

    Yields the folder for all temporary files made in the meantime.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rl-campaign-"))
        stack.enter_context(patch.object(tempfile, "tempdir", folder))
        stack.enter_context(patch("inspect_tinker_plugin.rl.hooks.TIMEOUT", 1.0))
        stack.enter_context(patch("inspect_tinker_plugin.episode.sandbox.START_GRACE", 1.0))
        level = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        stack.callback(logging.disable, level)
        yield folder


@dataclass(frozen=True)
class _Footprint:
    """A process's resources: episodes that are over must not have added to them."""

    folder: str
    names: frozenset[str]
    tasks: frozenset[str]
    threads: int
    files: int

    @classmethod
    def take(cls, folder: str) -> _Footprint:
        return cls(
            folder,
            frozenset(os.listdir(folder)),
            frozenset(_named(task) for task in asyncio.all_tasks()),
            len([t for t in threading.enumerate() if not t.name.startswith("asyncio_")]),
            len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0,
        )

    async def compare(self) -> list[str]:
        """Return what is left, after a delay in which things may still end."""
        for _ in range(100):
            now = _Footprint.take(self.folder)
            grown = now.files > self.files or now.threads > self.threads
            if now.tasks <= self.tasks and not (running_episodes or grown):
                break
            await asyncio.sleep(0.1)
        left = [f"task {name}" for name in sorted(now.tasks - self.tasks)]
        left += [f"episode {task.get_name()}" for task in running_episodes]
        left += [f"file {name}" for name in sorted(now.names - self.names)]
        if alive := sandbox_places(PROVIDER).alive:
            left.append(f"{alive} places of sandboxes")
        if now.threads > self.threads:
            left.append(f"{now.threads - self.threads} threads")
        if now.files > self.files:
            left.append(f"{now.files - self.files} open files")
        return left


def _named(task: asyncio.Task[Any]) -> str:
    return f"{task.get_name()} {task.get_coro()!r:.120}"
