"""Cases of the parity corpus give over the wire what they give in one process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest
from tests.parity.cases import ParityCase, load_corpus
from tests.rl.policies import renderer
from tests.serve.engine import serving
from tests.serve.lent import lend
from tests.serve.server import hosted
from tinker_cookbook.completers import TokenCompleter

from inspect_tinker_plugin.options import EpisodeOptions
from inspect_tinker_plugin.serve import RolloutService
from inspect_tinker_plugin.testing import ScriptedPolicy

CASES = [
    each
    for each in load_corpus(Path(__file__).parents[1] / "parity" / "corpus")
    if not each.tokens and each.ordered
    # Its episodes have no reward; a training refuses it as well.
    if each.id != "task-without-a-scorer"
]
SOME = ("react-with-tool", "handoff-to-a-sub-agent", "single-answer", "dict-score", "rejected")


def options_of(case: ParityCase) -> dict[str, Any]:
    names = [each.name for each in dataclasses.fields(EpisodeOptions)]
    return {"reward": "mean", **{name: getattr(case.options, name) for name in names}}


def policy(case: ParityCase) -> TokenCompleter:
    return cast("TokenCompleter", ScriptedPolicy(renderer(case.renderer), case.script))


def marks(case: ParityCase) -> list[pytest.MarkDecorator]:
    docker = [pytest.mark.docker] if case.docker else []
    return [*docker, *([] if case.id in SOME else [pytest.mark.nightly])]


@pytest.mark.parametrize(
    "case", [pytest.param(each, id=each.id, marks=marks(each)) for each in CASES]
)
async def test_a_case_is_the_same_over_the_wire(case: ParityCase) -> None:
    options = options_of(case)
    service = RolloutService(case.task(), renderer(case.renderer), **options)
    own = await service.run_episode(0, lend(policy(case)))
    task = case.task()
    async with (
        serving(policy(case)) as url,
        hosted(task, sampler=url, with_renderer=case.renderer, **options) as served,
    ):
        body = {"task": task.name, "sample": 0, "size": 1}
        status, answer = await served.post("/v1/rollouts", body)
    assert status == 200, answer
    [rollout] = answer["rollouts"]
    assert rollout["reward"] == own.reward
    assert (rollout["failure"] or {}).get("cause") == (own.failure and own.failure.cause)
    for name in ("tokens", "mask", "logprobs"):
        expected = [getattr(each, name) for each in own.branches]
        assert [each[name] for each in rollout["branches"]] == expected
