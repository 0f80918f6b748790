"""A tool-using agent: answer a question about a log file with bash, in a sandbox.

    inspect eval example_tasks/log_search.py --model openai/gpt-4o-mini

The model's commands run in a container if Docker is here with the image (`docker pull
python:3.12-slim`). Otherwise they run on your own machine with your own rights, where the
answers lie in a file, too: that is for scripts, and not for a model that you train.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.agent import AgentSubmit, react
from inspect_ai.dataset import json_dataset
from inspect_ai.scorer import match
from inspect_ai.tool import bash

DATA = Path(__file__).parent / "data" / "log_search.jsonl"

INSTRUCTIONS = """
You are an operations engineer. A log file lies in the current directory. Find the answer with
the bash tool (grep, sort, uniq and awk are there), then submit it: the bare answer, no sentence.
""".strip()


@task
def log_search(sandbox: str | None = None, attempts: int = 1) -> Task:
    """Five questions about three log files.

    Args:
        sandbox: "local" or "docker" (which uses the compose.yaml beside this file); the latter
            if it can be had.
        attempts: answers that the agent may submit before it is over.
    """
    return Task(
        dataset=json_dataset(str(DATA)),
        solver=react(
            prompt=INSTRUCTIONS,
            tools=[bash(timeout=30)],
            attempts=attempts,
            # Score the answer alone: naming every user on the way to it must not pay.
            submit=AgentSubmit(answer_only=True),
        ),
        scorer=match(location="exact"),
        sandbox=sandbox or own_sandbox(),
        message_limit=30,
    )


def own_sandbox() -> str:
    """A container if an engine has the image of compose.yaml, else this machine, with a warning."""
    image = os.environ.get("EXAMPLE_TASKS_IMAGE", "python:3.12-slim")
    try:
        found = subprocess.run(
            ["docker", "image", "inspect", image], capture_output=True, timeout=60
        )
        if found.returncode == 0:
            return "docker"
        cure = f"`docker pull {image}`"
    except (OSError, subprocess.TimeoutExpired):
        cure = "Docker"
    print(
        f"{Path(__file__).name}: the model's commands will run on this machine, where they can "
        f"read the answers and all your files; {cure} gives them a container.",
        file=sys.stderr,
    )
    return "local"
