"""Any program can be the agent: this one has twenty lines and speaks to OpenAI's API.

    inspect eval example_tasks/diary.py --model openai/gpt-4o-mini
    make demo-program

The program (programs/diary.py) asks for an entry on each of three days and keeps them in a file,
which is what is scored. Its API calls go to the model under training, as `docs/agents.md` tells.
The model only writes text: the program is ours, so it may run on this machine ("local").
"""

from __future__ import annotations

import json
import random
import socket
import sys
from contextlib import suppress
from itertools import cycle
from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.agent import Agent, AgentState, agent, sandbox_agent_bridge
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer, stderr
from inspect_ai.solver import TaskState
from inspect_ai.util import sandbox

PROGRAMS = Path(__file__).parent / "programs"
ALLOWED = "abcdefghijklm"
DAYS = 3
TIMEOUT = 600  # seconds that the program may take, its model's included


@task
def diary(sandbox: str = "local", samples: int = 64) -> Task:
    """Keep a diary in which only some letters occur.

    Args:
        sandbox: "local", "docker" or "docker_pool"; the last two build programs/Dockerfile.
        samples: size of the dataset; the samples differ in their numbers only.
    """
    return Task(
        dataset=MemoryDataset(
            [
                Sample(id=number, input=f"{number}. Write some of these letters: {ALLOWED}")
                for number in range(1, samples + 1)
            ],
            name="diary",
        ),
        solver=run_program(sys.executable if sandbox == "local" else "python3"),
        scorer=share_of_letters(),
        sandbox=sandbox if sandbox == "local" else (sandbox, str(PROGRAMS / "Dockerfile")),
    )


@agent
def run_program(python: str) -> Agent:
    """Run the program in the sandbox, with the bridge as its API.

    Args:
        python: the interpreter that has OpenAI's client.
    """

    async def execute(state: AgentState) -> AgentState:
        async with sandbox_agent_bridge(state, port=free_port()) as bridge:
            await sandbox().write_file("diary.py", (PROGRAMS / "diary.py").read_text())
            done = await sandbox().exec(
                [python, "diary.py", str(DAYS), state.messages[-1].text],
                env={
                    "OPENAI_BASE_URL": f"http://localhost:{bridge.port}/v1",
                    "OPENAI_API_KEY": "none",
                },
                timeout=TIMEOUT,
            )
        if not done.success:  # a program that fails is an error, not a bad score
            raise RuntimeError(f"the program ended with {done.returncode}: {done.stderr[-2000:]}")
        return bridge.state

    return execute


# Below those that outgoing connections take; in another order in every process.
PORTS = cycle(random.sample(range(20_000, 32_000), 12_000))


def free_port() -> int:
    """Find a port of this machine; with "local", episodes at once share its network."""
    for port in PORTS:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("PORTS has no end")


@scorer(metrics=[mean(), stderr()])
def share_of_letters() -> Scorer:
    """The share of allowed letters in what the diary says, white space aside, from 0 to 1."""

    async def score(state: TaskState, target: Target) -> Score:
        entries = (await sandbox().read_file("diary.jsonl")).splitlines()
        text = "".join("".join(json.loads(entry) for entry in entries).split())
        value = sum(letter in ALLOWED for letter in text) / len(text) if text else 0.0
        return Score(value=value, answer=text)

    return score
