"""Scoring in a clean sandbox: no attack that stays in the policy's sandbox reaches the scorers."""

from __future__ import annotations

from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.event import InfoEvent
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import sandbox
from tests.inspect_docker_pool.conftest import missing_engine

from inspect_tinker_plugin import (
    Cause,
    EpisodeOptions,
    EpisodeResult,
    EpisodeRunner,
    clean_sandbox,
)

HONEST = "echo 'def double(x): return 2 * x' > double.py"
CHECK = "import sys; sys.path.insert(0, '.'); from double import double; assert double(21) == 42"

ATTACKS = {
    "conftest and own test": "printf 'print(1)' > conftest.py; echo 'pass' > check.py",
    "sitecustomize": (
        "d=$(python3 -c 'import site; print(site.getsitepackages()[0])'); "
        "echo 'import os; os._exit(0)' > $d/sitecustomize.py; "
        "echo 'import os; os._exit(0)' > sitecustomize.py"
    ),
    "pth": (
        "d=$(python3 -c 'import site; print(site.getsitepackages()[0])'); "
        "echo 'import os; os._exit(0)' > $d/x.pth"
    ),
    "replaced interpreter": (
        "p=$(command -v python3); rm $p; printf '#!/bin/sh\\nexit 0\\n' > $p; chmod +x $p"
    ),
    "process left behind": "(while :; do echo pass > check.py; done) >/dev/null 2>&1 &",
    "replaced shell": "cp /bin/true /bin/sh",
}


@solver
def works(script: str) -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        await sandbox().exec(["sh", "-c", script], timeout=20)
        return state

    return solve


@scorer(metrics=[mean()])
def by_check(copy: list[str] | None = None) -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        if copy is None:
            done = await sandbox().exec(["python3", "check.py"], timeout=20)
        else:
            async with clean_sandbox(copy=copy) as box:
                assert sandbox() is box
                done = await box.exec(["python3", "check.py"], timeout=20)
        return Score(value=float(done.success))

    return score


def task(script: str, in_sandbox: Any = "local", **given: Any) -> Task:
    sample = Sample(id=1, input="Write double.py.", files={"check.py": CHECK})
    given = {"scorer": by_check(), **given}
    return Task(dataset=[sample], solver=works(script), sandbox=in_sandbox, **given)


async def run(task: Task, **options: Any) -> EpisodeResult:
    runner = EpisodeRunner(task, options=EpisodeOptions(**options), keep_log=True)
    episode = runner.episode(task.dataset[0])
    try:
        result = await episode.start()
        assert isinstance(result, EpisodeResult)
        return result
    finally:
        await episode.close()


def copied_of(result: EpisodeResult) -> Any:
    """What the log says was copied."""
    assert result.build_log is not None
    [info] = [event for event in result.build_log().events if isinstance(event, InfoEvent)]
    assert info.source == "score_sandbox"
    return info.data


FRESH: dict[str, Any] = {"score_sandbox": "fresh", "score_files": ["double.py"]}


@pytest.mark.parametrize("way", ["option", "task", "scorer"])
async def test_an_honest_answer_is_scored_as_ever_and_a_changed_check_is_not_run(way: str) -> None:
    given: dict[str, Any] = {}
    options: dict[str, Any] = {}
    if way == "option":
        options = FRESH
    elif way == "task":
        given["metadata"] = FRESH
    else:
        given["scorer"] = by_check(copy=["double.py"])
    honest = await run(task(HONEST, **given), **options)
    cheat = await run(task("echo pass > check.py", **given), **options)
    assert (honest.score_values(), cheat.score_values()) == ({"by_check": 1.0}, {"by_check": 0.0})
    assert (await run(task("echo pass > check.py"))).score_values() == {"by_check": 1.0}
    assert copied_of(honest) == {"copied": ["double.py"], "not_copied": {}}


async def test_links_large_files_and_start_up_files_are_left(tmp_path: Any) -> None:
    secret = tmp_path / "secret.py"
    secret.write_text("x")
    script = (
        f"ln -s {secret} link.py; ln -s {tmp_path} folder; echo pass > conftest.py; "
        "head -c 5000000 /dev/zero > large.py; mkfifo pipe.py; mkdir deep; echo 1 > deep/a.txt; "
        f"echo pass > check.py; {HONEST}"
    )
    files = ["*.py", "folder/*", "deep/**"]
    result = await run(task(script), score_sandbox="fresh", score_files=files)
    copied = copied_of(result)
    assert copied["copied"] == ["double.py", "deep/a.txt"]
    left = copied["not_copied"]
    assert left.keys() == {"check.py", "conftest.py", "folder/secret.py", "large.py", "link.py"}
    assert left["link.py"] == left["folder/secret.py"] == "a link"


async def test_a_clean_sandbox_that_does_not_start_is_a_failure_of_the_sandbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from inspect_ai.util._sandbox.local import LocalSandboxEnvironment as Local  # private: no other

    start, starts = Local.sample_init, []

    async def once(*given: Any) -> Any:
        starts.append(given)
        if len(starts) > 1:
            raise RuntimeError("no room")
        return await start(*given)

    monkeypatch.setattr(Local, "sample_init", once)
    result = await run(task(HONEST), **FRESH)
    assert result.error is not None
    assert result.error.cause is Cause.SANDBOX
    assert "no room" in str(result.error)


@pytest.mark.docker
@pytest.mark.parametrize("provider", ["docker_pool", "docker"])
async def test_attacks_that_stay_in_a_container_earn_nothing(provider: str) -> None:
    if (reason := missing_engine()) is not None:
        pytest.skip(reason)
    from tests.inspect_rl_audit.corpus.sandboxes import compose

    box = (provider, compose()[1])
    options = {**FRESH, "max_sandboxes": 1}
    assert (await run(task(HONEST, box), **options)).score_values() == {"by_check": 1.0}
    for name, attack in ATTACKS.items():
        assert (await run(task(attack, box), **options)).score_values() == {"by_check": 0.0}, name
