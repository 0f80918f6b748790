"""Plugins: the example packages through their entry points, and packages that are broken."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, overload

import pytest
from click.testing import CliRunner
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from tests.packages import install
from tests.packages import run as run_program
from tests.rewards.episodes import failed_member, finished, member
from tests.tools.runs import add, looping, ran, run, tool_texts

from inspect_rl_audit import AuditOptions, resolve_probes, run_audit
from inspect_tinker_plugin.cli.main import describe_plugins, plugin_commands, plugins_command, rl
from inspect_tinker_plugin.contracts.episodes import EpisodeResult
from inspect_tinker_plugin.contracts.errors import (
    ConfigError,
    PluginError,
)
from inspect_tinker_plugin.contracts.hooks import (
    EpisodeEnded,
    EpisodeObserver,
    EpisodeStarted,
    GroupOutcome,
    SamplePool,
    SampleStage,
    TurnTaken,
)
from inspect_tinker_plugin.plugins.manager import Plugin, Plugins, default_plugins
from inspect_tinker_plugin.rewards import resolve_group_reward, resolve_reward
from inspect_tinker_plugin.rl.hooks import (
    EpisodeHooks,
    Observers,
)
from inspect_tinker_plugin.samplers import resolve_sampler
from inspect_tinker_plugin.tasks.loading import find_providers
from inspect_tinker_plugin.tasks.samples import SelectedSamples, sample_stages
from inspect_tinker_plugin.testing import call, say
from inspect_tinker_plugin.tools import resolve_tool_executor

REWARDS = """
    from inspect_tinker_plugin import hookimpl
    from inspect_tinker_plugin.rewards import Mean

    @hookimpl
    def inspect_rl_reward_aggregators():
        return {"%s": Mean}
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path, into which a test installs packages."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    default_plugins.cache_clear()
    yield tmp_path
    default_plugins.cache_clear()
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) in {str(p) for p in tmp_path.glob("*.py")}:
            del sys.modules[name]


def plugin(plugins: Plugins, name: str) -> Plugin:
    [found] = [each for each in plugins.plugins if each.name == name]
    return found


def task(**metadata: Any) -> Task:
    samples = [Sample(id=1, input="one two three"), Sample(id=2, input="one two")]
    return Task(name="words", dataset=samples, metadata=metadata or None)


# the names that the example packages provide


def test_what_is_installed_is_listed_with_package_version_hooks_and_names() -> None:
    plugins = default_plugins()
    assert [each.name for each in plugins.plugins[:2]] == ["builtin", "inspect_rl_audit"]
    acme = plugin(plugins, "acme_rewards")
    assert acme == Plugin(
        name="acme_rewards",
        package="acme-rewards",
        version="0.1.0",
        hooks={
            "inspect_rl_reward_aggregators": ("brevity",),
            "inspect_rl_group_aggregators": ("consensus",),
        },
    )
    assert [each.error for each in plugins.plugins] == [None] * len(plugins.plugins)


async def test_inspect_rl_reward_aggregators() -> None:
    result = finished({"match": 1}, completion="one two three four")
    reward = await resolve_reward("brevity(score:match, words=2)")(result)
    assert (reward.value, reward.metrics["reward/words"]) == (0.5, 4)
    inside = await resolve_reward("weighted(brevity(words=1)=2, match=1)")(result)
    assert inside.value == 1.5


async def test_inspect_rl_group_aggregators() -> None:
    group = [member(0, completion=text) for text in ("4", "4", "5", "4 ")]
    rewards = await resolve_group_reward("consensus")([*group, failed_member()])
    assert [None if r is None else r.value for r in rewards] == [0.75, 0.75, 0.25, 0.75, None]


async def test_inspect_rl_tool_executors(tmp_path: Path) -> None:
    ran.clear()
    executor = resolve_tool_executor({"add": f"recorded(file='{tmp_path / 'calls.jsonl'}')"})
    for _ in range(2):
        result = await run(looping(add()), [say("", call("add", x=1, y=2)), "done"], executor)
        assert tool_texts(result) == ["3"]
    assert ran == [("add", 1, 2)]


async def test_inspect_rl_audit_probes(tmp_path: Path) -> None:
    options = AuditOptions(out=tmp_path, probes=["shouting(word='NO')"])
    samples = [Sample(id=1, input="Yes or no?", target="no"), Sample(id=2, input="?", target="x")]
    report = await run_audit(Task(dataset=samples, scorer=includes()), options)
    [found] = report.findings
    assert (found.code, found.sample, found.evidence["policy"]) == (
        "acme-shouting",
        1,
        "shouting:NO",
    )
    assert (tmp_path / found.evidence["log"]).is_file()
    with pytest.raises(ConfigError, match="Did you mean shouting"):
        resolve_probes(["shoutin"])


def test_inspect_rl_commands(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(
        "from inspect_ai import Task, task\n"
        "from inspect_ai.dataset import Sample\n"
        "@task\n"
        "def two():\n"
        "    return Task(dataset=[Sample(id='a', input='one two'), Sample(id='b', input='one')])\n"
    )
    done = CliRunner().invoke(rl, ["words", f"{tmp_path}/task.py"])
    assert [line.split() for line in done.output.splitlines()] == [["2", "a"], ["1", "b"]]
    refused = CliRunner().invoke(rl, ["words", f"{tmp_path}/nowhere.py"])
    assert refused.exit_code == 1
    assert "there is no file" in refused.output
    assert "Count the words of every question" in CliRunner().invoke(rl, ["--help"]).output


def test_inspect_rl_samplers() -> None:
    samples = [Sample(id=i, input="?", metadata={"level": i // 2}) for i in range(4)]
    sampler = resolve_sampler("by_level(enough=0.5)")()
    sampler.begin(SamplePool(task="words", samples=samples, group_size=2, seed=1))
    assert set(sampler.choose(0, 20)) == {0, 1}
    for position in (0, 1):
        sampler.learn(GroupOutcome(position=position, rewards=(1.0, 0.5), step=0))
    assert set(sampler.choose(1, 20)) == {2, 3}
    with pytest.raises(ConfigError, match="Did you mean by_level"):
        resolve_sampler("by_lvel")


# packages that are broken


BROKEN = {
    "import error": ("import no_such_module", "No module named 'no_such_module'"),
    "syntax error": ("def (", "SyntaxError"),
    "exits": ("raise SystemExit(3)", "SystemExit"),
    "unknown hook": (
        """
        from inspect_tinker_plugin import hookimpl

        @hookimpl
        def inspect_rl_reward_agregators():
            return {}
        """,
        "inspect_rl_reward_agregators.*the hooks are inspect_rl_reward_aggregators",
    ),
    "unknown argument": (
        """
        from inspect_tinker_plugin import hookimpl

        @hookimpl
        def inspect_rl_samples(task, dataset):
            return None
        """,
        "inspect_rl_samples.*dataset",
    ),
    "unmarked": (
        "def inspect_rl_samples(task):\n    return None",
        "inspect_rl_samples is not marked with @hookimpl",
    ),
    "marked under another name": (
        "from inspect_tinker_plugin import hookimpl\n\n@hookimpl\ndef rl_samples(task): ...\n"
        "@hookimpl\ndef inspect_rl_samples(task): ...",
        "there is no hook rl_samples; the hooks are",
    ),
    "no hook": ("x = 1", "implements no hook"),
    "no mapping": (REWARDS.replace('{"%s": Mean}', "[Mean]"), "not a mapping"),
    "no name": (REWARDS % "two words", "'two words'; use letters"),
    "no command": (
        """
        from inspect_tinker_plugin import hookimpl

        @hookimpl
        def inspect_rl_commands():
            return {"sum": sum}
        """,
        "as 'sum', which is no click.Command",
    ),
    "no factory": (REWARDS.replace("Mean}", "1}") % "one", "cannot be called"),
    "raises": (REWARDS.replace('{"%s": Mean}', "1 / 0"), "ZeroDivisionError"),
    "name of a built-in": (REWARDS % "mean", "'mean', which inspect-tinker-plugin has built in"),
}


@pytest.mark.parametrize(("code", "error"), BROKEN.values(), ids=list(BROKEN))
async def test_a_broken_plugin_is_kept_with_its_error_and_harms_nothing_else(
    site: Path, code: str, error: str
) -> None:
    install(site, "broken_rewards", code, version="3.1")
    plugins = default_plugins()
    broken = plugin(plugins, "broken_rewards")
    assert (broken.label, broken.hooks) == ("broken-rewards 3.1", {})
    assert broken.error is not None
    with pytest.raises(PluginError, match=error):
        raise PluginError(broken.error)
    assert "broken_rewards.py" in broken.error, "the file that is to blame"
    assert "BROKEN" in describe_plugins(plugins)
    for expression in ("mean", "brevity"):
        resolved = resolve_reward(expression)
        assert (await resolved(finished({"match": 1}))).value == 1


def test_asking_for_what_a_broken_plugin_would_give_says_so(site: Path) -> None:
    install(site, "broken_rewards", "import no_such_module", version="3.1")
    for resolve in (resolve_reward, resolve_group_reward):
        with pytest.raises(ConfigError) as caught:
            resolve("sparkle")
        assert "unknown" in str(caught.value)
        assert "broken-rewards 3.1, which may provide it, is broken" in str(caught.value)
        assert "no_such_module" in str(caught.value)
    with pytest.raises(ConfigError, match=r"unknown tool executor.*broken-rewards 3\.1"):
        resolve_tool_executor("sparkle")


def test_an_unknown_command_names_the_plugin_that_may_have_it(site: Path) -> None:
    install(site, "broken_commands", "import no_such_module", version="3.1")
    output = CliRunner().invoke(rl, ["sparkle"]).output
    assert "No such command 'sparkle'; plugin" in output
    assert "broken-commands 3.1, which may provide it, is broken" in output
    listed = CliRunner().invoke(rl, ["--help"]).output
    assert "Broken: broken_commands; see `inspect rl plugins`." in listed


def test_a_command_that_is_built_in_stays_so(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(
        site,
        "greedy",
        """
        import click
        from inspect_tinker_plugin import hookimpl

        @hookimpl
        def inspect_rl_commands():
            return {"train": click.Command("train")}
        """,
    )
    assert set(plugin_commands()) == {"audit", "words"}
    assert "plugin 'greedy' of greedy 1.0 gives the command 'train'" in capsys.readouterr().err


def test_a_name_that_two_packages_claim_names_both(site: Path) -> None:
    install(site, "one_rewards", REWARDS % "sparkle")
    install(site, "two_rewards", REWARDS % "sparkle", version="2.0")
    plugins = default_plugins()
    with pytest.raises(ConfigError, match=r"by one-rewards 1\.0 and by two-rewards 2\.0"):
        resolve_reward("sparkle")
    resolve_reward("mean")
    assert "one-rewards 1.0 and by two-rewards 2.0" in describe_plugins(plugins)


@pytest.mark.parametrize(
    ("statement", "error"),
    [("raise ValueError('no samples today')", "ValueError: no samples"), ("exit(4)", "SystemExit")],
)
def test_a_hook_that_raises_names_its_package(site: Path, statement: str, error: str) -> None:
    hook = (
        "from inspect_tinker_plugin import hookimpl\n\n@hookimpl\ndef inspect_rl_samples(task):\n"
    )
    install(site, "picky_samples", f"{hook}    {statement}\n")
    with pytest.raises(PluginError, match=rf"picky-samples 1\.0\) raised {error}"):
        sample_stages(task())


def test_a_class_with_hooks_is_a_plugin_too(site: Path) -> None:
    install(
        site,
        "classy",
        """
        from inspect_tinker_plugin import hookimpl
        from inspect_tinker_plugin.rewards import Mean

        class Classy:
            @hookimpl
            def inspect_rl_reward_aggregators(self):
                return {"classy": Mean}
        """,
        entry="classy:Classy",
    )
    resolve_reward("classy")


# samples, sandboxes, observers


class Counted(Sequence[Sample]):
    """A large dataset that counts how often a sample is looked at."""

    def __init__(self) -> None:
        self.looked = 0

    def __len__(self) -> int:
        return 100_000

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        assert isinstance(index, int)
        self.looked += 1
        return Sample(id=index, input=f"question {index}")


def staged(samples: Sequence[Sample], stage: SampleStage) -> SelectedSamples:
    stages = ((plugin(default_plugins(), "acme_tools"), stage),)
    return SelectedSamples(samples, stages, range(len(samples)))


def test_samples_are_transformed_when_they_are_asked_for() -> None:
    dataset = Counted()
    samples = staged(dataset, SampleStage(transform=lambda s: s.model_copy(update={"target": "x"})))
    assert len(samples) == 100_000
    assert dataset.looked == 0
    assert samples[99_999].target == "x"
    assert dataset.looked == 1


def test_samples_of_the_task_stay_as_they_are() -> None:
    dataset = task().dataset

    def spoil(sample: Sample) -> Sample:
        sample.input = "spoiled"
        return sample

    assert staged(dataset, SampleStage(transform=spoil))[0].input == "spoiled"
    assert dataset[0].input == "one two three"


def test_a_filter_that_fails_names_package_and_sample() -> None:
    samples = staged(task().dataset, SampleStage(keep=lambda s: 1 / (s.id == 1) > 0))
    with pytest.raises(PluginError, match=r"acme-tools.*sample 2: ZeroDivisionError"):
        samples.drop_filtered()


@pytest.mark.parametrize("sandbox", [None, "docker", "local", ("docker", "compose.yaml")])
def test_what_inspect_knows_is_left_to_inspect(sandbox: Any) -> None:
    assert find_providers(sandbox) is None


@pytest.mark.parametrize("sandbox", ["nowhere", {"docker": "nowhere"}], ids=str)
def test_an_unknown_sandbox_provider_is_refused(sandbox: Any) -> None:
    with pytest.raises(ConfigError, match=r"'nowhere'.*on_this_machine"):
        find_providers(sandbox)


class Meddler(EpisodeObserver):
    """Changes everything that it receives, then fails."""

    async def on_episode_start(self, event: EpisodeStarted) -> None:
        event.sample.input = "changed"
        raise RuntimeError("I always fail")

    def on_turn(self, event: TurnTaken) -> None:
        raise RuntimeError("here too")

    def on_episode_end(self, event: EpisodeEnded) -> None:
        event.scores["match"].score.value = 0
        event.messages[0].content = "changed"


async def test_an_observer_changes_nothing_and_its_failure_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    result = finished({"match": 1})
    hooks = EpisodeHooks(observers=Observers([Meddler()]))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await hooks.report_start("t", result.sample, 1)
            await hooks.report_end(result, None)
    assert untouched(result)
    [record] = caplog.records
    assert f"{__name__}.Meddler" in record.getMessage()
    assert "I always fail" in record.getMessage()


def untouched(result: EpisodeResult) -> bool:
    return (
        result.sample.input == "2 + 2?"
        and result.scores["match"].score.value == 1
        and result.state.messages[0].text == "2 + 2?"
    )


# the command line


def test_plugins_are_listed_as_json() -> None:
    shown = CliRunner().invoke(plugins_command, ["--json"])
    data = json.loads(shown.output)
    assert {each["name"] for each in data["plugins"]} >= {"builtin", "acme_rewards", "acme_tools"}
    [tools] = [each for each in data["plugins"] if each["name"] == "acme_tools"]
    assert tools["version"] == "0.2.0"
    assert tools["hooks"]["inspect_rl_tool_executors"] == ["recorded"]
    assert data["clashes"] == {}


python = partial(run_program, sys.executable)


@pytest.mark.slow
def test_a_broken_plugin_does_not_take_inspect_down(tmp_path: Path) -> None:
    install(tmp_path, "broken_rewards", "import no_such_module")
    listed = python("-m", "inspect_ai", "rl", "plugins", path=tmp_path, code=3)
    assert "broken-rewards 1.0)  BROKEN" in listed
    assert f"({tmp_path / 'broken_rewards.py'}:1)" in listed
    assert "samplers             curriculum" in listed
    assert "version" in python("-m", "inspect_ai", "info", "version", path=tmp_path)


def test_the_line_of_a_broken_plugin_is_that_of_the_broken_hook(site: Path) -> None:
    code = (
        "from inspect_tinker_plugin.plugins import hookimpl\n\n\n"
        "@hookimpl\ndef inspect_rl_reward_aggregators():\n    return {}\n\n\n"
        "@hookimpl\ndef inspect_rl_samples(tsk):\n    return None\n"
    )
    install(site, "later_hook", code)
    error = plugin(default_plugins(), "later_hook").error
    assert error is not None
    assert error.endswith("later_hook.py:9)")


@pytest.mark.slow
def test_plugins_are_loaded_when_a_name_is_looked_up_and_not_before(tmp_path: Path) -> None:
    script = (
        "import sys, inspect_tinker_plugin, inspect_tinker_plugin.rewards as rewards\n"
        "assert 'acme_rewards' not in sys.modules\n"
        "rewards.resolve_reward('brevity')\n"
        "assert 'acme_rewards' in sys.modules\n"
    )
    python("-c", script, path=tmp_path)
