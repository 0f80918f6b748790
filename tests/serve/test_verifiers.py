"""verifiers' own evaluation and env server run a task, with the tokens and rewards of a rollout.

verifiers is not a dependency of the tests: ``make clients`` installs it and runs them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task
from tests.packages import run
from tests.rl.policies import TOKENIZER, Words, renderer, tool_call
from tests.rl.tasks import adding, arithmetic, crashing, sums
from tests.serve.engine import serving
from tests.serve.lent import own
from tests.serve.test_server import ADD, CASES
from tinker_cookbook.completers import TokenCompleter

from inspect_tinker_plugin import ConfigError
from inspect_tinker_plugin.serve import RolloutResult

vf = pytest.importorskip("verifiers.v1", reason="verifiers is not installed: make clients")

MODULE = "made_of_an_inspect_task"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Installs a module that exports a task's taskset, harness and environment."""
    from inspect_tinker_plugin.serve.verifiers import as_verifiers_taskset

    def install(task: Task, **options: Any) -> str:
        made = as_verifiers_taskset(task, renderer=renderer(), **options)
        names = ("Taskset", "Harness", "Env")
        module = type(sys)(MODULE)
        module.__all__ = list(names)  # type: ignore[attr-defined]
        module.__dict__.update(zip(names, made, strict=True))
        module.__spec__ = sys.__spec__
        monkeypatch.setitem(sys.modules, MODULE, module)
        return MODULE

    return install


async def evaluated(module: str, words: TokenCompleter, out: Path, **settings: Any) -> list[Any]:
    """Run verifiers' evaluation command as it runs it; return the traces."""
    from verifiers.v1.cli.eval.runner import run_eval
    from verifiers.v1.configs.cli.eval import EvalConfig

    settings = {"env": {"taskset": {"id": module}}, "select": {"limit": 1}, **settings}
    async with serving(words) as url:
        client = {"type": "train", "base_url": url}
        config = EvalConfig.model_validate(
            {"model": "m", "client": client, "push": False, "rich": None, "output_dir": out}
            | settings
        )
        return [trace for episode in await run_eval(config) for trace in episode.traces]


def sequences(branches: Sequence[Any], tokens: str, mask: str) -> list[Any]:
    return sorted(
        (list(getattr(each, tokens)), [int(bit) for bit in getattr(each, mask)], each.logprobs)
        for each in branches
    )


@pytest.mark.parametrize("client", ["train", "eval"])
@pytest.mark.parametrize(("task", "lines"), CASES)
def test_the_evaluation_command_gets_the_rollouts_tokens_and_reward(
    module: Callable[..., str], tmp_path: Path, task: Task, lines: list[str], client: str
) -> None:
    name = module(task)
    [trace] = asyncio.run(
        evaluated(name, Words(lines), tmp_path)
        if client == "train"
        else by_completions(name, Words(lines), tmp_path)
    )
    check(trace, asyncio.run(own(task, Words(lines))))
    assert trace.stop_condition == "agent_completed"


def check(trace: Any, result: RolloutResult) -> None:
    assert trace.ok, trace.errors
    assert trace.reward == result.reward
    assert sequences(trace.branches, "token_ids", "sampled_mask") == sequences(
        result.branches, "tokens", "mask"
    )
    assert trace.num_turns == len(result.turns)
    assert [call.node for call in trace.calls] == [
        index for index, node in enumerate(trace.nodes) if node.sampled
    ]


async def by_completions(module: str, words: Words, out: Path) -> list[Any]:
    async with serving(words) as url:
        return await evaluated(module, words, out, client={"type": "eval", "base_url": url})


def test_groups_run_at_most_so_many_at_once(module: Callable[..., str], tmp_path: Path) -> None:
    words = Words(["1"], delay_s=0.01)
    how: dict[str, Any] = {"num_rollouts": 3, "max_concurrent": 2, "select": {"limit": 2}}
    traces = asyncio.run(evaluated(module(arithmetic()), words, tmp_path, **how))
    assert sorted(trace.task.data.id for trace in traces) == ["s0"] * 3 + ["s1"] * 3
    assert {trace.reward for trace in traces} == {1.0, 0.0}


def test_a_failure_has_verifiers_type_and_no_reward(
    module: Callable[..., str], tmp_path: Path
) -> None:
    task = Task(dataset=sums(1), scorer=crashing())
    [trace] = asyncio.run(evaluated(module(task), Words(["1"]), tmp_path))
    assert not trace.ok
    assert trace.errors[-1].type == "TaskError"
    assert "the scorer is broken" in trace.errors[-1].message
    assert not trace.rewards
    assert trace.num_turns == 1


def test_an_episode_that_a_deadline_cuts_is_no_zero(
    module: Callable[..., str], tmp_path: Path
) -> None:
    env = {
        "taskset": {"id": MODULE},
        "agent": {"timeout": {"rollout": 0.2}, "runtime": {"type": "subprocess"}},
    }
    slow = Words(["1"], delay_s=30)
    [trace] = asyncio.run(evaluated(module(arithmetic()), slow, tmp_path, env=env))
    assert not trace.ok
    assert "has no reward" in trace.errors[-1].message


def test_verifiers_budget_of_turns_ends_and_scores(
    module: Callable[..., str], tmp_path: Path
) -> None:
    env = {
        "taskset": {"id": MODULE},
        "agent": {"max_turns": 1, "runtime": {"type": "subprocess"}},
    }
    [trace] = asyncio.run(evaluated(module(adding()), Words([ADD]), tmp_path, env=env))
    assert trace.ok, trace.errors
    assert (trace.reward, trace.num_turns, trace.stop_condition) == (0.0, 1, "max_turns")
    assert trace.is_truncated


def test_the_env_server_streams_turns_and_a_cancel_ends_the_episode(
    module: Callable[..., str],
) -> None:
    from verifiers.v1.serve.client import EnvClient
    from verifiers.v1.serve.server import EnvServer
    from verifiers.v1.utils.loaders import resolve_env_config

    async def run() -> None:
        config = resolve_env_config({"taskset": {"id": module(adding())}})
        server = EnvServer(config, "tcp://127.0.0.1:0", max_concurrent=4)
        serving_it = asyncio.create_task(server.run())
        client = EnvClient(server.address)
        data = next(iter(server.env.taskset)).data.model_dump()
        deltas: list[dict[str, Any]] = []
        try:
            async with serving(Words([ADD, "It is 1."])) as url:
                lent = vf.TrainClientConfig(base_url=url)
                episode = await client.run(
                    lent, "m", vf.SamplingConfig(), data, on_delta=deltas.append
                )
            [trace] = episode.traces
            assert (episode.ok, trace.reward) == (True, 1.0)
            assert len([each for each in deltas if each.get("calls")]) == 2
            async with serving(Words([ADD], delay_s=30)) as url:
                lent = vf.TrainClientConfig(base_url=url)
                abandoned = asyncio.create_task(client.run(lent, "m", vf.SamplingConfig(), data))
                while not server._running:  # noqa: ASYNC110 - verifiers has no event for it
                    await asyncio.sleep(0.01)
                abandoned.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await abandoned
                while server._running:  # noqa: ASYNC110 - nor for its end
                    await asyncio.sleep(0.01)
        finally:
            await client.close()
            serving_it.cancel()
            await serving_it

    asyncio.run(run())


def test_a_reward_that_compares_a_group_is_refused() -> None:
    from inspect_tinker_plugin.serve.verifiers import as_verifiers_taskset

    with pytest.raises(ConfigError, match="runs each by itself"):
        as_verifiers_taskset(arithmetic(), renderer=renderer(), group_reward="rank")


def test_a_written_package_is_installed_and_evaluated_by_its_name(tmp_path: Path) -> None:
    site, bare, hub = tmp_path / "site-packages", tmp_path / "shop", tmp_path / "Shop-Hub"
    python = partial(run, sys.executable, "-W", "ignore", "-m", path=site)
    pip = ("pip", "install", "-qq", "--no-deps", "--no-build-isolation", "--target", site)
    python("inspect_tinker_plugin", "new", bare)
    python(*pip, bare / "shop-tasks")
    python("inspect_tinker_plugin", "new", hub, "--verifiers", "shop_tasks/stock")
    module, fixed = hub / "shop_hub" / "__init__.py", f"model={str(TOKENIZER)!r}"
    text = module.read_text().replace(
        '"shop_tasks/stock"', f'"shop_tasks/stock", {fixed}, renderer="qwen3_instruct"'
    )
    module.write_text(text)  # no hub of models to ask for the run's
    python(*pip, hub)
    count, submit = tool_call("count", '{"item": "pears"}'), tool_call("submit", '{"answer": "19"}')

    async def evaluate() -> None:
        async with serving(Words([count, submit])) as url:
            where = ("--client.type", "train", "--client.base-url", url, "--no-push")
            command = (Path(sys.executable).with_name("vf-eval"), "shop-hub", "-n", "1", *where)
            await asyncio.to_thread(run, *command, cwd=tmp_path, path=site)

    asyncio.run(evaluate())
    [traces] = tmp_path.glob("outputs/*/traces.jsonl")
    [episode] = [json.loads(line) for line in traces.read_text().splitlines()]
    assert episode["ok"], episode["errors"]
    assert [each["info"]["inspect_rl"]["reward"] for each in episode["traces"]] == [1.0]
