"""Agent programs as they are shipped: an episode is one sequence, and scores as in an eval."""

from __future__ import annotations

import os
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
from inspect_ai.model import ChatMessageAssistant, ModelOutput
from inspect_ai.scorer import value_to_float
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
