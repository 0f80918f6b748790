"""Runs one sample on one side of the parity contract: `inspect_ai.eval`, or an episode."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from inspect_ai import Task, eval_async
from inspect_ai.dataset import Sample
from inspect_ai.log import read_eval_log_async
from inspect_ai.util import display_type

from inspect_tinker_plugin.episode.runner import EpisodeRunner
from inspect_tinker_plugin.episode.types import EpisodeOptions, EpisodeResult
from inspect_tinker_plugin.testing.record import Trace, trace_of_log, trace_of_result
from inspect_tinker_plugin.testing.scripted import ScriptedAPI, recording, scripted_model
from inspect_tinker_plugin.testing.scripts import Player, Script

TaskSource: TypeAlias = Task | Callable[[], Task]
"""A task, or what makes it: state that a task keeps must not leak between the sides."""


class ParityError(RuntimeError):
    """A side could not be run at all, so that there is nothing to compare."""


def make_task(source: TaskSource) -> Task:
    """The task itself, or a new one when there is a factory."""
    return source if isinstance(source, Task) else source()


async def run_eval(
    source: TaskSource,
    script: Script,
    *,
    sample: int = 0,
    options: EpisodeOptions | None = None,
    ordered: bool = True,
) -> Trace:
    """One sample through ``inspect_ai.eval``, its log written and read back.

    Args:
        source: The task.
        script: What the model says.
        sample: Position of the sample in the task's dataset.
        options: The same options that the episode gets, as ``eval`` arguments.
        ordered: Whether the model calls come in a fixed order.

    Raises:
        ParityError: The eval ended before the sample was run.
    """
    options = options or EpisodeOptions()
    if options.max_turns is not None:
        raise ParityError(
            "max_turns has no counterpart in an eval (its turn limit makes one call more and "
            "drops the answer): compare with Task(turn_limit=...) instead"
        )
    os.environ.setdefault("INSPECT_DISPLAY", "none")
    display_type()
    policy_script = scripted_model(script, name="policy")
    api = policy_script.api
    assert isinstance(api, ScriptedAPI)
    assert api.player is not None
    with recording() as others, tempfile.TemporaryDirectory(prefix="parity-") as log_dir:
        [written] = await eval_async(
            make_task(source),
            model=policy_script,
            model_roles=dict(options.model_roles) or None,
            limit=(sample, sample + 1),
            log_dir=log_dir,
            log_realtime=False,
            fail_on_error=False,
            message_limit=options.message_limit,
            token_limit=options.token_limit,
            time_limit=options.time_limit,
            working_limit=options.working_limit,
            cost_limit=options.cost_limit,
            score_on_error=options.score_on_error or None,
        )
        log = await read_eval_log_async(written.location, resolve_attachments="full")
    if not log.samples:
        reason = log.error.message if log.error else f"status {log.status}"
        raise ParityError(f"inspect_ai.eval ran no sample of task {log.eval.task!r}: {reason}")
    return trace_of_log(log.samples[0], policy=api.player, others=others, ordered=ordered)


async def run_episode(
    source: TaskSource,
    script: Script,
    *,
    sample: int = 0,
    options: EpisodeOptions | None = None,
    ordered: bool = True,
) -> Trace:
    """One sample as an episode, its model calls answered with messages (no tokens).

    Args:
        source: The task.
        script: What the policy says.
        sample: Position of the sample in the task's dataset.
        options: How the episode is run.
        ordered: Whether the model calls come in a fixed order.
    """
    with recording() as others:
        task = make_task(source)
        runner = EpisodeRunner(task, options=options or EpisodeOptions(), keep_log=True)
        player = Player(script)
        result = await play(runner, with_id(task.dataset[sample], sample), player)
        return trace_of_result(result, policy=player, others=others, ordered=ordered)


async def play(runner: EpisodeRunner, sample: Sample, player: Player) -> EpisodeResult:
    """Run one episode to its end with a player's replies."""
    episode = runner.episode(sample)
    try:
        outcome = await episode.start()
        while not isinstance(outcome, EpisodeResult):
            # the solver goes on to change these messages after they were answered
            seen = [message.model_copy(deep=True) for message in outcome.messages]
            try:
                answer = await player.answer(replace(outcome, messages=seen))
            except Exception as error:
                outcome = await episode.reply(error)
            else:
                outcome = await episode.reply(answer)
        return outcome
    finally:
        await episode.close()


def with_id(sample: Sample, position: int) -> Sample:
    """The sample with the id that an eval gives to samples that have none."""
    return sample if sample.id is not None else sample.model_copy(update={"id": position + 1})
