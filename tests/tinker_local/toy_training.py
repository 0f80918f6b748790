"""Train the tiny model on a toy reward with the cookbook's own loop: ``python toy_training.py``.

Needs the variables of ``LocalServer.environ``. Prints one JSON line: the mean reward of each step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import chz
from tinker import ModelInput
from tinker_cookbook import renderers
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.rl import train
from tinker_cookbook.rl.problem_env import ProblemGroupBuilder
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    RLDataset,
    RLDatasetBuilder,
    StepResult,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer


class SpacedWords(Env):
    """One turn; the reward is the share of sampled tokens that begin with a space."""

    def __init__(self, renderer: renderers.Renderer) -> None:
        self.renderer = renderer

    @property
    def stop_condition(self) -> StopCondition:
        return self.renderer.get_stop_sequences()

    async def initial_observation(self) -> tuple[ModelInput, StopCondition]:
        message = renderers.Message(role="user", content="Write some words.")
        return self.renderer.build_generation_prompt([message]), self.stop_condition

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        tokens = self.renderer.tokenizer.convert_ids_to_tokens(action)
        spaced = sum(token.startswith("\u0120") for token in tokens)
        return StepResult(
            reward=spaced / max(1, len(tokens)),
            episode_done=True,
            next_observation=ModelInput.empty(),
            next_stop_condition=self.stop_condition,
            metrics={},
        )


@dataclass(frozen=True)
class SameGroups(RLDataset):
    """Every batch is the same few groups."""

    renderer: renderers.Renderer
    groups: int
    group_size: int
    batches: int

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        make = partial(SpacedWords, self.renderer)
        builder = ProblemGroupBuilder(env_thunk=make, num_envs=self.group_size)  # type: ignore[arg-type]
        return [builder] * self.groups

    def __len__(self) -> int:
        return self.batches


@chz.chz
class SameGroupsBuilder(RLDatasetBuilder):
    model: str
    batches: int
    groups: int = 4
    group_size: int = 8

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        renderer = renderers.get_renderer("qwen3_instruct", get_tokenizer(self.model))
        return SameGroups(renderer, self.groups, self.group_size, self.batches), None


def rewards(log_path: Path) -> list[float]:
    """Mean reward of each step, from the cookbook's metrics file."""
    lines = (log_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [row["env/all/reward/total"] for row in rows if "env/all/reward/total" in row]


def main() -> None:
    """Run the number of steps that the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("log_path", type=Path)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--off-policy", type=int, default=None, help="use the async loop")
    args = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("tinker_cookbook").setLevel(logging.WARNING)
    # To mypy, classes of chz take no arguments.
    new_config: Any = train.Config
    new_async: Any = train.AsyncConfig
    new_dataset: Any = SameGroupsBuilder
    config = new_config(
        model_name=args.model,
        renderer_name="qwen3_instruct",
        recipe_name="toy",
        log_path=str(args.log_path),
        dataset_builder=new_dataset(model=args.model, batches=args.steps),
        learning_rate=args.learning_rate,
        lora_rank=16,
        max_tokens=16,
        eval_every=0,
        save_every=args.save_every,
        num_groups_to_log=0,
        async_config=None
        if args.off_policy is None
        else new_async(max_steps_off_policy=args.off_policy, groups_per_batch=4),
    )
    asyncio.run(train.main(config))
    print(json.dumps(rewards(args.log_path)))


if __name__ == "__main__":
    main()
