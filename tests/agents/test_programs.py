"""Agent programs as they are shipped: an episode is one sequence, and scores as in an eval."""

from __future__ import annotations

import os
import re
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import inspect_ai
import psutil
import pytest
import tinker
from inspect_ai import Task
from inspect_ai.log import EvalSample
from inspect_ai.model import ChatMessageAssistant, ChatMessageTool, ChatMessageUser, ModelOutput
from inspect_ai.scorer import value_to_float
from inspect_ai.tool import ToolCall
from inspect_ai.util import SandboxEnvironmentSpec
from tests.agents import programs
from tests.inspect_docker_pool.conftest import owned
from tests.packages import require_agent_clients
from tests.tokens.conversations import assert_trained
from tinker_cookbook.completers import StopCondition, TokensWithLogprobs
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.rollouts import do_group_rollout

from inspect_docker_pool import DockerPoolConfig
from inspect_docker_pool.manager import close_all, pool_manager
from inspect_tinker_plugin.contracts.episodes import TurnRequest
from inspect_tinker_plugin.rl.dataset import as_rl_dataset
from inspect_tinker_plugin.tasks.reference import resolve_task
from inspect_tinker_plugin.testing import ScriptedPolicy, call, load_renderer, say, scripted_model
from inspect_tinker_plugin.tokens.episode import EpisodeTokens

require_agent_clients()
pytestmark = [pytest.mark.agents, pytest.mark.long, pytest.mark.timeout(900)]

Script = Callable[[TurnRequest], ModelOutput]


@dataclass
class Rolled:
    """What a rollout gave."""

    reward: float
    metrics: dict[str, Any]
    sampled: list[tuple[list[int], list[int]]]
    """Each prompt with its reply, in time, as the sampler saw them."""

    data: list[tinker.Datum]


@dataclass
class Evaluated:
    """What an eval gave."""

    turns: int
    sample: EvalSample

    @property
    def reward(self) -> float:
        (score,) = (self.sample.scores or {}).values()
        return value_to_float()(score.value)


class Sampler(ScriptedPolicy):
    """Keeps what the sampler was asked and said."""

    def __init__(self, script: Script, request: Callable[[], TurnRequest]) -> None:
        super().__init__(load_renderer(), script, request=request)
        self.sampled: list[tuple[list[int], list[int]]] = []

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        said = await super().__call__(model_input, stop, max_tokens=max_tokens)
        self.sampled.append((model_input.to_ints(), list(said.tokens)))
        return said


async def rolled(
    task: Task, script: Script, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> Rolled:
    """Roll the first sample out in a group of one, by the cookbook."""
    requests: list[TurnRequest] = []
    prompt = EpisodeTokens.prompt

    def noted(tokens: EpisodeTokens, request: TurnRequest) -> tinker.ModelInput:
        requests.append(request)
        return prompt(tokens, request)

    policy: Any = Sampler(script, lambda: requests[-1])
    dataset = as_rl_dataset(task, load_renderer(), batch_size=1, group_size=1, limit=1, **options)
    (builder,) = dataset.get_batch(0)
    with monkeypatch.context() as patch:
        patch.setattr(EpisodeTokens, "prompt", noted)
        group = await do_group_rollout(builder, policy)
    (trajectory,) = group.trajectories_G
    (reward,) = group.get_total_rewards()
    return Rolled(
        reward,
        dict(trajectory.transitions[-1].metrics) | dict(group.metrics_G[0]),
        policy.sampled,
        trajectory_to_data(trajectory, 1.0),
    )


async def evaluated(task: Task, script: Script, folder: Path) -> Evaluated:
    """Run the first sample in an eval, from the log that it wrote."""
    turns: list[TurnRequest] = []

    def counted(request: TurnRequest) -> ModelOutput:
        turns.append(request)
        return script(request)

    (log,) = await inspect_ai.eval_async(
        task,
        model=scripted_model(counted),
        limit=1,
        log_dir=str(folder),
        fail_on_error=False,
    )
    assert log.samples, log.error
    (sample,) = log.samples
    return Evaluated(len(turns), sample)


EXAMPLES = Path(__file__).parents[2] / "example_tasks"
SHELLS = {"Bash": "command", "bash": "command", "exec_command": "cmd", "shell": "command"}
CODE = """def running_total(numbers):
    totals = []
    for number in numbers:
        totals.append(number + (totals[-1] if totals else 0))
    return totals
"""
STEPS = [
    ("I write it down. \n\n", f"cat > solution.py <<'END'\n{CODE}END"),
    ("", "python3 -c 'import solution; print(solution.running_total([1, 2, 3]))'"),
    ("  That works.", "cat solution.py | head -3"),
]
OWN_FILES = {f"claude-{os.getuid()}", "cc-socks"}
"""What Claude Code leaves in the host's folder of temporary files, when it runs there."""
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


@dataclass(frozen=True)
class Program:
    """An agent program, and what its model has to say to solve the task."""

    binary: str | None
    task: str
    args: dict[str, Any]
    last: str | None = None
    """The command that ends it, where that is a command."""


PROGRAMS = {
    "claude_code": Program("claude", "write_function.py", {"agent": "claude_code"}),
    "codex_cli": Program("codex", "write_function.py", {"agent": "codex_cli"}),
    "mini_swe_agent": Program("mini", "write_function.py", {"agent": "mini_swe_agent"}, SUBMIT),
    "openai": Program(None, "diary.py", {}),
}


def shell(request: TurnRequest, text: str, command: str) -> ModelOutput:
    """Call the program's shell tool, whatever it is called there."""
    (name,) = {tool.name for tool in request.tools} & SHELLS.keys()
    return say(text, call(name, **{SHELLS[name]: command}))


def solves(program: Program, request: TurnRequest) -> ModelOutput:
    """Answer as a policy that writes the function, tries it and is done."""
    turn = sum(isinstance(message, ChatMessageAssistant) for message in request.messages)
    if program.task == "diary.py":
        return say([" abc\n", "ba dz", "abcdefghijklm"][turn])
    if not {tool.name for tool in request.tools} & SHELLS.keys():
        return say("A title")
    if turn < len(STEPS):
        return shell(request, *STEPS[turn])
    return shell(request, "", program.last) if program.last else say("Done. \n")


HELPERS: dict[str, Callable[[str], ToolCall]] = {
    "Agent": lambda what: call("Agent", description=what, prompt=what),
    "spawn_agent": lambda what: call("spawn_agent", message=what),
}
AGAIN: dict[str, Callable[[str], ToolCall]] = {
    "Agent": lambda id: call("SendMessage", to=id, summary="again", message="Once more."),
    "spawn_agent": lambda id: call("send_input", target=id, message="Once more."),
}


def delegates(request: TurnRequest) -> ModelOutput:
    """Answer as a policy that has two helpers do the work at once, and asks the first again."""
    turn = sum(isinstance(message, ChatMessageAssistant) for message in request.messages)
    asked = "\n".join(m.text for m in request.messages if isinstance(m, ChatMessageUser))
    if "PART" in asked:
        text, command = STEPS[0 if "PART 1" in asked else 2]
        return say(" It is done. ") if turn % 2 else shell(request, text, command)
    (kind,) = {tool.name for tool in request.tools} & HELPERS.keys()
    results = "\n".join(m.text for m in request.messages if isinstance(m, ChatMessageTool))
    helpers = re.findall(r"agent_?[iI]d\W+([0-9a-f-]+)", results)
    if turn == 0:
        return say("Two help. ", *map(HELPERS[kind], ["PART 1: write.", "PART 2: read."]))
    if turn == 2:  # when it is done: Codex gives up a call that is under way
        return say("", AGAIN[kind](helpers[0]))
    if turn < 5 and kind == "spawn_agent":
        return say("", call("wait_agent", targets=[helpers[turn == 4]], timeout_ms=60_000))
    return say("Done.")


@pytest.fixture
def nothing_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Whatever programs start and write is gone after the test."""
    mark = uuid.uuid4().hex
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    for name, value in {
        "AGENT_TEST": mark,
        "HOME": str(tmp_path / "home"),  # programs of the host write there
        "TMPDIR": str(temporary),
        "PATH": os.pathsep.join(
            [str(programs.BIN), os.path.dirname(sys.executable), os.environ["PATH"]]
        ),
    }.items():
        monkeypatch.setenv(name, value)
    close_all()
    yield
    owner = pool_manager().owner.id
    close_all()
    assert owned(owner) == [] if programs.missing_image() is None else True
    assert [process.cmdline() for process in marked(mark)] == []
    left = {path.name for path in temporary.iterdir()}
    assert left <= OWN_FILES


def marked(mark: str) -> Iterator[psutil.Process]:
    """Give the processes that have the test's mark in their environment, but for this one."""
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("AGENT_TEST") == mark:
                yield process
        except psutil.Error:
            continue


def task_of(program: Program, sandbox: str) -> Task:
    """Make the example task, in the tests' own image where it runs in containers."""
    args = {**program.args, "sandbox": sandbox}
    task = resolve_task(str(EXAMPLES / program.task), args).task
    if sandbox == "docker_pool":
        config = DockerPoolConfig(image=programs.IMAGE, warm=0, environment=IN_IMAGE)
        task.sandbox = SandboxEnvironmentSpec("docker_pool", config)
    return task


IN_IMAGE = {"PYTHONPATH": "/opt/agents/python-3.11"}
"""Where programs of the tests' image find the client library."""


@pytest.fixture(params=["local", pytest.param("docker_pool", marks=pytest.mark.docker)])
def sandbox(request: pytest.FixtureRequest, nothing_left: None) -> str:
    """Each sandbox in turn, where it can be had."""
    name: str = request.param
    if name == "docker_pool" and (reason := programs.missing_image()):
        pytest.skip(reason)
    return name


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest, sandbox: str) -> Program:
    """Each program in turn, where it is there."""
    found = PROGRAMS[request.param]
    if found.binary is not None and (reason := programs.missing(found.binary)):
        pytest.skip(reason)
    return found


async def test_an_episode_is_one_sequence_and_scores_as_in_an_eval(
    program: Program,
    sandbox: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def script(asked: TurnRequest) -> ModelOutput:
        return solves(program, asked)

    theirs = await evaluated(task_of(program, sandbox), script, tmp_path / "logs")
    ours = await rolled(task_of(program, sandbox), script, monkeypatch)
    assert theirs.sample.error is None, theirs.sample.error
    assert ours.reward == theirs.reward > 0.8
    assert len(ours.sampled) == theirs.turns
    assert_trained(ours.sampled, ours.data)
    assert len(ours.data) == 1
    assert ours.metrics["tokens/segments"] == 1
    assert ours.metrics["tokens/rerendered"] == ours.metrics["tokens/resampled"] == 0


@pytest.mark.docker
@pytest.mark.parametrize("name", ["claude_code", "codex_cli"])
async def test_each_sub_agent_is_one_sequence(
    name: str, nothing_left: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if reason := programs.missing_image():
        pytest.skip(reason)
    program = PROGRAMS[name]
    theirs = await evaluated(task_of(program, "docker_pool"), delegates, tmp_path / "logs")
    ours = await rolled(task_of(program, "docker_pool"), delegates, monkeypatch)
    assert theirs.sample.error is None, theirs.sample.error
    assert ours.reward == theirs.reward > 0.8
    assert_trained(ours.sampled, ours.data)
    assert len(ours.data) == ours.metrics["tokens/segments"] == 3
    assert ours.metrics["tokens/rerendered"] == ours.metrics["tokens/resampled"] == 0
