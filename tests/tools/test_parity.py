"""Executors and observers do not change an episode: a part of the parity corpus agrees under hooks.

The executor lets Inspect run every tool; the observer spoils whatever it is shown.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.parity.cases import ParityCase, load_corpus
from tests.tools.runs import scope

from inspect_tinker_plugin.contracts.episodes import EpisodeResult
from inspect_tinker_plugin.contracts.hooks import (
    EpisodeEnded,
    EpisodeObserver,
    EpisodeStarted,
    TurnTaken,
)
from inspect_tinker_plugin.episode.runner import EpisodeRunner
from inspect_tinker_plugin.rl.hooks import EpisodeHooks, Observers
from inspect_tinker_plugin.testing import sides
from inspect_tinker_plugin.testing.traces import compare_traces
from inspect_tinker_plugin.tools import InspectExecutor

CORPUS = load_corpus(Path(__file__).resolve().parents[1] / "parity" / "corpus")[::8]
"""Every eighth case, of each file of the corpus."""


class Spoiler(EpisodeObserver):
    """Changes everything that it can reach."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_episode_start(self, event: EpisodeStarted) -> None:
        self.seen.append("start")
        event.sample.input = "spoiled"
        event.sample.metadata = {"spoiled": True}

    def on_turn(self, event: TurnTaken) -> None:
        self.seen.append("turn")
        for message in event.messages:
            message.content = "spoiled"
        if event.output is not None:
            event.output.choices.clear()

    async def on_episode_end(self, event: EpisodeEnded) -> None:
        self.seen.append("end")
        for score in event.scores.values():
            score.score.value = "spoiled"
        raise RuntimeError("and fails in the end")


async def hooked(runner: EpisodeRunner, sample: Any, player: Any, spoiler: Spoiler) -> Any:
    """Play an episode as the RL layer does, with an executor and an observer around it."""
    hooks = EpisodeHooks(InspectExecutor(), scope(), Observers([spoiler]))
    episode = runner.episode(sample)
    try:
        outcome = await hooks.start(episode)
        while not isinstance(outcome, EpisodeResult):
            # the solver changes these messages after they were answered
            seen = [message.model_copy(deep=True) for message in outcome.messages]
            request = replace(outcome, messages=seen)
            try:
                reply = await player.answer(request)
            except Exception as error:
                reply = error
            await hooks.report_turn(request, reply)
            outcome = await episode.reply(reply)
        await hooks.report_end(outcome, None)
        return outcome
    finally:
        await episode.close()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.id, marks=[pytest.mark.docker] if case.docker else [])
        for case in CORPUS
    ],
)
async def test_an_executor_and_an_observer_keep_parity(
    case: ParityCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await sides.run_eval(case.task, case.script, case.how)
    spoiler, play = Spoiler(), sides.play

    async def play_hooked(runner: Any, sample: Any, player: Any) -> Any:
        return await hooked(runner, sample, player, spoiler)

    monkeypatch.setattr(sides, "play", play_hooked)
    found = await sides.run_episode(case.task, case.script, case.how)
    monkeypatch.setattr(sides, "play", play)
    assert not compare_traces(expected, found)
    assert spoiler.seen == ["start", *["turn"] * len(found.requests), "end"]
