from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest
from inspect_ai.log._transcript import Transcript  # private: the class of episodes' transcripts
from inspect_ai.model import Model
from inspect_ai.solver import TaskState
from tests.packages import run

from inspect_tinker_plugin import inspect_internals
from inspect_tinker_plugin.inspect_internals import SUPPORTED_INSPECT, calls

SOURCES = sorted(Path(inspect_internals.__file__).parent.glob("*.py"))
PAGE = Path(__file__).parents[1] / "docs" / "upstream.md"
REASONS = dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", PAGE.read_text("utf-8"), re.MULTILINE))
EXCHANGED = re.findall(r"^\| (inspect_ai[\w.]*:[\w.]+) \|", PAGE.read_text("utf-8"), re.MULTILINE)


def imported_private_names(source: Path) -> set[str]:
    tree = ast.parse(source.read_text())
    names, modules = set(), {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("inspect_ai"):
            continue
        for alias in node.names:
            if "._" in str(node.module):
                names.add(f"{node.module}:{alias.name}")
            elif alias.name.startswith("_"):
                modules[alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=alias_name), attr=attr) if alias_name in modules:
                names.add(f"{modules[alias_name]}:{attr}")
    return names


def test_the_page_lists_what_is_imported_each_with_a_reason() -> None:
    imported = {*calls._MODEL_CALL_NAMES}.union(*map(imported_private_names, SOURCES))
    modules = {name for name in REASONS if ":" in name} - {"_cli.main:inspect"}
    assert {name.removeprefix("inspect_ai.") for name in imported} == modules
    assert all(len(reason.split()) >= 3 for reason in REASONS.values())


@pytest.mark.parametrize("name", [name for name in REASONS if ":" not in name])
def test_every_private_attribute_of_a_public_class_exists(name: str) -> None:
    owner, _, attribute = name.partition(".")
    found = {"Model": Model, "TaskState": TaskState, "Transcript": Transcript}[owner]
    set_by_init = found.__init__.__code__.co_names  # type: ignore[misc]  # looked at, not called
    assert hasattr(found, attribute) or attribute in set_by_init


def test_an_unsupported_inspect_is_one_clear_error() -> None:
    code = (
        "import inspect_ai._eval.task.run as run, inspect_ai._eval.task.generate as generate\n"
        "from inspect_tinker_plugin.contracts.errors import VersionError\n"
        "for module, name in ((run, 'create_eval_sample'), (generate, 'task_generate')):\n"
        "    kept = getattr(module, name)\n"
        "    delattr(module, name)\n"
        "    try:\n"
        "        import inspect_tinker_plugin.inspect_internals\n"
        "    except VersionError as error:\n"
        "        print(error)\n"
        "    setattr(module, name, kept)\n"
    )
    lines = run(sys.executable, "-W", "ignore", "-c", code).splitlines()
    for line, name in zip(lines, ("create_eval_sample", "task_generate"), strict=True):
        assert name in line
        assert f"supported: {SUPPORTED_INSPECT}" in line


_BESIDE = """
import asyncio, importlib, inspect, json, logging, sys
from pathlib import Path
import inspect_ai, tinker_cookbook.renderers, transformers, anyio, docker
import inspect_ai.agent._bridge.sandbox.service, inspect_ai.agent._react
from inspect_ai import Task, eval_async
from inspect_ai.agent import as_solver, react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes, model_graded_qa
from inspect_ai.solver import Generate, TaskState, chain, generate, solver, use_tools
from inspect_ai.tool import ToolError, tool
from inspect_ai.util import ExecRemoteAwaitableOptions, sandbox, subprocess
from inspect_tinker_plugin.testing import call, say, scripted_model
from tests.agents.sandboxed import FILES, agent, free_port
from tests.rl.policies import Words, renderer, tool_call
from tinker_cookbook.rl.rollouts import do_group_rollout

folder = Path(sys.argv[1])
WATCHED = ("inspect_ai", "tinker_cookbook", "transformers", "tokenizers", "docker", "anyio")

def attributes():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in WATCHED:
            continue
        for attribute, value in list(vars(module).items()):
            if callable(value) or inspect.ismodule(value):
                found[f"{name}:{attribute}"] = value
            if inspect.isclass(value) and value.__module__ == name:
                for method, body in list(vars(value).items()):
                    if callable(body):
                        found[f"{name}:{attribute}.{method}"] = body
    for name in [*logging.root.manager.loggerDict]:
        found[f"logger {name}"] = getattr(logging.getLogger(name).isEnabledFor, "__func__", None)
    return found

@tool
def look():
    async def execute(at: str) -> str:
        '''Look.

        Args:
            at: Where.
        '''
        if at == "nowhere":
            raise ToolError("there is nothing")
        return (await sandbox().exec(["cat", at])).stdout

    return execute

@solver
def commands():
    async def solve(state, generate):
        box = sandbox()
        ran = await box.exec(["sh", "-c", "cat found; exit 3"])
        beside = await box.exec_remote(["echo", "beside"], stream=False)
        alone = await subprocess(["echo", "alone"])
        state.metadata["ran"] = [ran.returncode, ran.stdout, beside.stdout, alone.stdout]
        return state
    return solve

def task():
    steps = [use_tools(look()), generate(), commands(), agent(port=free_port(), turns=2)]
    files = {**FILES, "found": "plum"}
    samples = [Sample(id=1, input="Look, and say plum.", target="plum", files=files)]
    judge = scripted_model(lambda request: "GRADE: C", name="judge")
    scorers = [includes(), model_graded_qa(model=judge)]
    return Task(samples, chain(steps), scorer=scorers, sandbox="local")

def replies():
    looks = [say("", call("look", at=at)) for at in ("found", "nowhere")]
    return [*looks, *["plum"] * 8]

async def evaluate(name):
    model = scripted_model(replies())
    [log] = await eval_async(task(), model=model, log_dir=str(folder / name))
    assert log.status == "success", log.error
    [sample] = log.samples
    return {
        "messages": [[m.role, m.text, str(getattr(m, "error", None))] for m in sample.messages],
        # how often Inspect polls a sandbox depends on the time
        "events": [each.event for each in sample.events if each.event != "sandbox"],
        "sandbox": any(each.event == "sandbox" for each in sample.events),
        "scores": {name: score.value for name, score in sample.scores.items()},
        "ran": sample.metadata["ran"],
        "usage": {name: usage.total_tokens for name, usage in sample.model_usage.items()},
        "output": sample.output.completion,
    }

async def roll_out(log_dir=None):
    from inspect_tinker_plugin.rl.dataset import as_rl_dataset
    [builder] = as_rl_dataset(task(), renderer(), group_size=1, log_dir=log_dir).get_batch(0)
    words = Words([tool_call("look", '{"at": "found"}'), "plum", "plum", "plum"])
    return (await do_group_rollout(builder, words)).get_total_rewards()

async def roll_out_react():
    from inspect_tinker_plugin.rl.dataset import as_rl_dataset
    options = dict(scorer=includes(), sandbox="local", message_limit=6)
    plain = Task([Sample("?", id=1, target="so")], as_solver(react()), **options)
    for log_dir in (None, folder / "react"):
        [builder] = as_rl_dataset(plain, renderer(), log_dir=log_dir).get_batch(0)
        await do_group_rollout(builder, Words(["so"]))

async def main():
    found = {"before": await evaluate("before")}
    rewards = await roll_out()
    found["beside"], more = await asyncio.gather(evaluate("beside"), roll_out(folder / "logs"))
    await roll_out_react()
    after = attributes()
    replaced = [name for name in before if name in after and after[name] is not before[name]]
    print(json.dumps([replaced, found, rewards, more]))

renderer()
before = attributes()
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_episodes_replace_only_what_is_listed_and_evals_beside_them_are_as_before(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _BESIDE, str(tmp_path)]
    out = run(*command, cwd=Path(__file__).parents[1])
    replaced, found, *rewards = json.loads(out.splitlines()[-1])
    assert "inspect_ai.model._call_tools:call_tool" in replaced
    assert {*replaced} <= {*EXCHANGED}
    assert len(EXCHANGED) == 6
    assert found["before"]["scores"]["includes"] == "C"
    assert found["before"]["sandbox"]
    assert found["beside"] == found["before"]
    assert rewards == [[1.0], [1.0]]
