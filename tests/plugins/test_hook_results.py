"""The results of plugins are checked: an error names the plugin, and none becomes a zero."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from tests.functions import make_tool
from tests.packages import install
from tests.rewards.rollouts import rewards_of
from tests.tools.runs import add

from inspect_tinker_plugin import as_rl_dataset
from inspect_tinker_plugin.contracts.episodes import EpisodeResult
from inspect_tinker_plugin.contracts.errors import Cause, ConfigError, EpisodeError, PluginError
from inspect_tinker_plugin.plugins.manager import default_plugins
from inspect_tinker_plugin.testing import Script, call, load_renderer, say, submit
from inspect_tinker_plugin.tools import ToolInvocation

PLUGIN = """
    from inspect_ai.util import SandboxEnvironmentSpec
    from inspect_tinker_plugin import hookimpl
    from inspect_tinker_plugin.rewards import Reward
    from inspect_tinker_plugin.plugins import SampleStage

    class Gives:
        def __init__(self, *parts): pass
        async def __call__(self, argument):
            return %(given)s

    @hookimpl
    def %(hook)s(%(parameters)s):
        return %(answer)s
"""
WHO = r"plugin 'wrong_gifts' (of |\()wrong-gifts 1\.0"


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Install a package with one hook for the duration of a test."""
    monkeypatch.syspath_prepend(tmp_path)

    def add_plugin(hook: str, answer: str, given: str = "None", parameters: str = "") -> None:
        parts = {"hook": hook, "answer": answer, "given": given, "parameters": parameters}
        install(tmp_path, "wrong_gifts", PLUGIN % parts)
        default_plugins.cache_clear()

    yield add_plugin
    sys.modules.pop("wrong_gifts", None)
    default_plugins.cache_clear()


def answering() -> Task:
    return Task(dataset=[Sample(id="a", input="?", target="yes")], scorer=includes())


def adding() -> Task:
    return Task(
        dataset=[Sample(input="?", target="3")],
        solver=[use_tools(add()), generate()],
        scorer=includes(),
    )


@pytest.mark.parametrize("given", ["None", "'1'", "Reward(float('nan'))"])
@pytest.mark.parametrize(
    "reward", ["gives", "mean(gives, score:includes)", "length(gives,target=9)"]
)
async def test_a_reward_that_is_none(plugin: Callable[..., None], reward: str, given: str) -> None:
    plugin("inspect_rl_reward_aggregators", "{'gives': Gives}", given)
    with pytest.raises(EpisodeError, match="gave") as caught:
        await rewards_of(answering(), ["yes"], reward=reward)
    assert caught.value.cause is Cause.REWARD
    if reward == "gives":
        assert caught.match(WHO)
    else:
        assert caught.match("Gives")


@pytest.mark.parametrize(
    "given",
    [
        "None",
        "[1.0]",
        "[1.0, 1.0, 1.0]",
        "'11'",
        "[object(), 1]",
    ],
)
async def test_group_rewards_that_are_too_few_too_many_or_none(
    plugin: Callable[..., None], given: str
) -> None:
    plugin("inspect_rl_group_aggregators", "{'gives': Gives}", given)
    with pytest.raises(EpisodeError, match=WHO) as caught:
        await rewards_of(answering(), ["yes"], group_size=2, group_reward="gives")
    assert caught.value.cause is Cause.REWARD
    penalised = await rewards_of(
        answering(), ["yes"], group_size=2, group_reward="gives", on_error={"reward": -1.0}
    )
    assert penalised == [-1.0, -1.0]


@pytest.mark.parametrize("given", ["None", "b'3'", "{'x': 1}", "[None]"])
@pytest.mark.parametrize("executor", ["gives", {"a*": "gives"}, "cached(inner=gives)"], ids=str)
async def test_a_tool_result_that_is_none(
    plugin: Callable[..., None], executor: Any, given: str
) -> None:
    plugin("inspect_rl_tool_executors", "{'gives': Gives}", given)
    script: Script = [say("", call("add", x=1, y=2)), "3"]
    with pytest.raises(EpisodeError, match="for a call of 'add'") as caught:
        await rewards_of(adding(), script, tool_executor=executor)
    assert caught.value.cause is Cause.TOOL
    assert caught.match("(?i)gives")
    if "cached" not in executor:
        assert caught.match(WHO)


async def test_the_executor_of_submit_is_named_too() -> None:
    async def forgets(invocation: ToolInvocation) -> Any:
        return None

    task = Task(dataset=[Sample(input="?", target="3")], solver=react(tools=[]), scorer=includes())
    with pytest.raises(EpisodeError, match=r"forgets' gave None for a call of 'submit'") as caught:
        await rewards_of(task, [submit("3")], tool_executor=forgets)
    assert caught.value.cause is Cause.TOOL


@pytest.mark.parametrize("given", ["'3'", "3", "3.5", "True", "[]"])
async def test_results_of_a_tool_pass(plugin: Callable[..., None], given: str) -> None:
    plugin("inspect_rl_tool_executors", "{'gives': Gives}", given)
    script: Script = [say("", call("add", x=1, y=2)), "3"]
    assert await rewards_of(adding(), script, tool_executor="gives") == [1.0]


async def test_what_the_tool_itself_gave_passes_through_an_executor() -> None:
    @make_tool
    async def odd(x: int) -> Any:
        """Give something odd.

        Args:
            x: Anything.
        """
        return {"x": x}

    async def passes(invocation: ToolInvocation) -> Any:
        return await invocation.run()

    task = Task(
        dataset=[Sample(input="?", target="3")],
        solver=[use_tools(odd()), generate()],
        scorer=includes(),
    )
    script: Script = [say("", call("odd", x=1)), "3"]
    assert await rewards_of(task, script, tool_executor=passes) == [1.0]


@pytest.mark.parametrize(
    ("stage", "problem"),
    [
        ("SampleStage(keep=lambda s: None)", "its filter gave None"),
        ("SampleStage(keep=lambda s: 'no')", "its filter gave 'no'"),
        ("SampleStage(keep=Gives())", "its filter gave <coroutine"),
        ("SampleStage(keep=3)", "keep is 3"),
        ("SampleStage(transform=lambda s: None)", "made None of sample 'a'"),
        ("SampleStage(transform=lambda s: s.input)", r"made '\?' of sample 'a'"),
        ("SampleStage(transform='upper')", "transform is 'upper'"),
        ("SampleStage(keep=lambda s: exit(0))", "failed on sample 'a': SystemExit: 0"),
        ("SampleStage(transform=lambda s: exit(0))", "failed on sample 'a': SystemExit: 0"),
        ("[SampleStage()]", "not a SampleStage"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine")
def test_a_stage_of_samples_that_gives_something_else(
    plugin: Callable[..., None], stage: str, problem: str
) -> None:
    plugin("inspect_rl_samples", stage, parameters="task")
    with pytest.raises(PluginError, match=problem) as caught:
        as_rl_dataset(answering(), load_renderer()).get_batch(0)
    assert caught.match(WHO)


def test_a_sample_that_loses_its_id_keeps_it(plugin: Callable[..., None]) -> None:
    change = "SampleStage(transform=lambda s: s.model_copy(update={'id': None}))"
    plugin("inspect_rl_samples", change, parameters="task")
    [builder] = as_rl_dataset(answering(), load_renderer()).get_batch(0)
    assert builder.sample.id == "a"


@pytest.mark.parametrize(
    ("hook", "answer"),
    [
        ("inspect_rl_scorers", "[lambda state, target: None]"),
        ("inspect_rl_scorers", "[None]"),
        ("inspect_rl_scorers", "{'a': 1}"),
        ("inspect_rl_episode_observers", "[object()]"),
        ("inspect_rl_episode_observers", "[Gives]"),
        ("inspect_rl_episode_observers", "5"),
    ],
)
def test_scorers_and_observers_that_are_none(
    plugin: Callable[..., None], hook: str, answer: str
) -> None:
    plugin(hook, answer, parameters="task")
    with pytest.raises(PluginError, match=WHO):
        as_rl_dataset(answering(), load_renderer()).get_batch(0)


@pytest.mark.parametrize(
    "answer", ["None", "'local'", "SandboxEnvironmentSpec('nowhere')", "exit(0)"]
)
async def test_a_sandbox_provider_that_gives_something_else(
    plugin: Callable[..., None], answer: str
) -> None:
    plugin("inspect_rl_sandbox_providers", "{'gives': lambda spec: " + answer + "}")
    sample = Sample(input="?", target="yes")
    task = Task(dataset=[sample], scorer=includes(), sandbox="local")
    with pytest.raises((EpisodeError, PluginError), match=WHO) as caught:
        await rewards_of(task, ["yes"], sandbox="gives")
    if isinstance(caught.value, EpisodeError):
        assert caught.value.cause is Cause.SANDBOX


@pytest.mark.parametrize(
    "factory", ["lambda: 3", "lambda: {}['x']", "lambda: int('x')", "lambda: exit(0)"]
)
def test_a_factory_that_makes_no_aggregator(plugin: Callable[..., None], factory: str) -> None:
    plugin("inspect_rl_reward_aggregators", f"{{'gives': {factory}}}")
    with pytest.raises(ConfigError, match=WHO):
        as_rl_dataset(answering(), load_renderer(), reward="gives")


async def test_a_reward_that_changes_its_sample_changes_no_other_episode() -> None:
    def careless(result: EpisodeResult) -> float:
        assert result.sample.metadata is not None
        result.sample.metadata["seen"] = result.sample.metadata.get("seen", 0) + 1
        result.sample.target = "no"
        return float(result.sample.metadata["seen"])

    sample = Sample(id="a", input="?", target="yes", metadata={"level": 1})
    task = Task(dataset=[sample], scorer=includes())
    assert await rewards_of(task, ["yes"], group_size=3, reward=careless) == [1.0, 1.0, 1.0]
    assert (sample.target, sample.metadata) == ("yes", {"level": 1})
