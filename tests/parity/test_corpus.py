"""Every case of the corpus: an episode matches an eval, in messages and in tokens."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import tinker
from inspect_ai.log import EvalSample
from tests.parity.cases import ParityCase, check_case, eval_trace, load_corpus
from tests.parity.logged import logged
from tests.rl.policies import plain
from tinker_cookbook.completers import TokenCompleter
from tinker_cookbook.rl import rollout_runner
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.rollout_runner import run_rollout
from tinker_cookbook.rl.types import Trajectory

from inspect_tinker_plugin.logs.rollout import SAMPLED_KEY, record_trajectory
from inspect_tinker_plugin.logs.rollout import trajectory as logged_trajectory
from inspect_tinker_plugin.rl.env import InspectEnv
from inspect_tinker_plugin.rl.group import arrange
from inspect_tinker_plugin.testing.kit import ParityReport, Side, describe
from inspect_tinker_plugin.testing.traces import Trace, differences

CASES = load_corpus(Path(__file__).parent / "corpus")

CONTAINERS = {
    "docker-shell-and-python",
    "docker-files-and-setup-script",
    "several-services",
    "docker-tool-timeout",
    "react-agent-in-docker",
}
"""Cases in containers that run per change."""


def parameters(side: Side) -> list[object]:
    cases = [each for each in CASES if not (side == "tokens" and each.tokens)]
    return [
        pytest.param(
            each,
            id=each.id,
            marks=[pytest.mark.docker] * each.docker
            # sandboxes, servers and their tools are the same, whoever samples
            + [pytest.mark.nightly] * (each.docker and each.id not in CONTAINERS)
            + [pytest.mark.nightly]
            * (side == "tokens" and (each.docker or each.id == "mcp-stdio-server")),
        )
        for each in cases
    ]


_expected: dict[str, Trace] = {}
"""Traces of evals by case, so that each case is evaluated once for both sides."""


async def agreed(case: ParityCase, side: Side) -> ParityReport:
    if case.id not in _expected:
        _expected[case.id] = await eval_trace(case)
    report = await check_case(case, side=side, expected=_expected[case.id])
    assert report.agrees, "\n".join(describe(report))
    return report


@pytest.mark.parametrize("case", parameters("messages"))
async def test_episode_agrees_with_eval(case: ParityCase) -> None:
    report = await agreed(case, "messages")
    logs = [each.log for each in (report.eval_side, report.episode_side) if each is not None]
    expected, found = [logged(log, ordered=case.ordered) for log in logs if log is not None]
    assert not [str(difference) for difference in differences(expected, found)]


@pytest.mark.parametrize("case", parameters("tokens"))
async def test_rollout_in_tokens_agrees_with_eval(
    case: ParityCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    rolled_out: list[Trajectory] = []

    async def rolling(policy: TokenCompleter, env: InspectEnv) -> Trajectory:
        trajectory = await run_rollout(policy, env)
        arrange(trajectory, env.tokens.turns)
        rolled_out.append(trajectory)
        return trajectory

    monkeypatch.setattr(rollout_runner, "run_rollout", rolling)
    report = await agreed(case, "tokens")
    assert report.episode_side is not None
    assert rolled_out or report.episode_side.error, "the rollout was not seen"
    for trajectory in rolled_out:
        assert_kept_in_a_log(trajectory)


def assert_kept_in_a_log(trajectory: Trajectory) -> None:
    """The datums that a log gives back are those of the trajectory, to the last bit."""
    dice = Random(1)
    for transition in trajectory.transitions:
        transition.ac.maybe_logprobs = [-dice.random() for _ in transition.ac.tokens]
    kept = record_trajectory(trajectory, 0.1)
    if kept is None:
        chunks = [chunk for each in trajectory.transitions for chunk in each.ob.chunks]
        assert not all(isinstance(chunk, tinker.EncodedTextChunk) for chunk in chunks)
        return
    record = EvalSample(id=1, epoch=1, input="", target="", store={SAMPLED_KEY: kept})
    read = logged_trajectory(EvalSample.model_validate_json(record.model_dump_json()))
    assert read is not None
    found, expected = (trajectory_to_data(each, 0.3) for each in (read, trajectory))
    assert [plain(datum) for datum in found] == [plain(datum) for datum in expected]


def test_most_of_the_corpus_is_played_through_tokens() -> None:
    left_out = {each.id: each.tokens for each in CASES if each.tokens}
    assert len(left_out) < len(CASES) / 6, left_out
