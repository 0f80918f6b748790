"""The task that a fault campaign runs; every part of it can be struck in a chosen episode."""

from __future__ import annotations

import math

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessage, GenerateConfig, ModelAPI, ModelOutput, get_model, modelapi
from inspect_ai.scorer import Score, Target, mean
from inspect_ai.solver import Generate, TaskState, use_tools
from inspect_ai.tool import ToolChoice, ToolInfo
from inspect_ai.util import sandbox
from tests.faults.campaign.folder import PROVIDER
from tests.faults.campaign.plan import Point, running_cases, strike, strike_here
from tests.functions import make_scorer, make_solver, make_tool

from inspect_tinker_plugin.contracts.episodes import EpisodeResult
from inspect_tinker_plugin.contracts.hooks import (
    EpisodeEnded,
    EpisodeObserver,
    EpisodeStarted,
    TurnTaken,
)
from inspect_tinker_plugin.episode.runner import HAD_NOT_ENDED
from inspect_tinker_plugin.rewards import UnscoredError


def clean_reward(number: int) -> float:
    """Return the reward of a case when nothing goes wrong; never zero."""
    return (number % 97 + 1) / 128


def answer(number: int) -> str:
    """Return the policy's final answer."""
    return f"ANSWER {number}."


@make_solver
async def asking(state: TaskState, generate: Generate) -> TaskState:
    """Ask one question, or run the tool loop."""
    await strike(Point.SOLVER_BEFORE, state.sample_id, state.epoch)
    state = await generate(state)
    await strike(Point.SOLVER_AFTER, state.sample_id, state.epoch)
    return state


@make_tool
async def look() -> str:
    """Look at the word in the sandbox."""
    await strike_here(Point.TOOL)
    return (await sandbox().exec(["cat", "word"])).stdout


@make_scorer(mean())
async def graded(state: TaskState, target: Target) -> Score:
    """Give the clean reward for the right answer; no score without an answer, never a zero."""
    await strike(Point.SCORER, state.sample_id, state.epoch)
    verdict = await get_model(role="grader").generate("Is it right?")
    said = state.output.completion if state.output else ""
    if verdict.completion != "yes" or answer(int(state.sample_id)) not in said:
        return Score.unscored()
    return Score(value=clean_reward(int(state.sample_id)))


@modelapi(name=PROVIDER)
class Judge(ModelAPI):
    """Says yes."""

    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput:
        await strike_here(Point.JUDGE)
        return ModelOutput.from_content(self.model_name, "yes")

    def should_retry(self, ex: BaseException) -> bool:
        return False


class Watching(EpisodeObserver):
    """An observer that can be struck at every event."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int | str | None, int]] = {}

    async def on_episode_start(self, event: EpisodeStarted, /) -> None:
        self._known[event.episode] = (event.sample.id, event.epoch)
        await strike(Point.OBSERVER_START, event.sample.id, event.epoch)

    async def on_turn(self, event: TurnTaken, /) -> None:
        await strike(Point.OBSERVER_TURN, *self._known[event.episode])

    async def on_episode_end(self, event: EpisodeEnded, /) -> None:
        self._known.pop(event.episode, None)
        running = running_cases.get(int(event.sample_id or 0))
        if running is not None and event.error is not None and HAD_NOT_ENDED in event.error:
            running.late = True
        await strike(Point.OBSERVER_END, event.sample_id, event.epoch)


async def reward(result: EpisodeResult) -> float:
    """Return the score; can be struck."""
    await strike(Point.REWARD, result.sample.id, result.epoch)
    scored = result.scores.get("graded")
    value = math.nan if scored is None else float(scored.score.as_float())
    if math.isnan(value):
        raise UnscoredError("there is no answer to score")
    return value


def make_task(agent: bool, cases: int) -> Task:
    """Make the task of a campaign, with a sample per case."""
    samples = [
        Sample(
            id=number,
            input=f"This is case {number}. What is the answer?",
            target=answer(number),
            files={"word": "plum"} if agent else None,
        )
        for number in range(cases)
    ]
    return Task(
        name="agent" if agent else "question",
        dataset=samples,
        solver=[use_tools(look()), asking()] if agent else asking(),
        scorer=graded(),
        sandbox=PROVIDER if agent else None,
        model_roles={"grader": f"{PROVIDER}/judge"},
    )
