"""A tool-using agent: answer a question about a log file with bash, in a sandbox.

    inspect eval example_tasks/log_search.py -T sandbox=docker --model openai/gpt-4o-mini

The default sandbox, "local", needs no Docker, and runs the model's commands on your own
machine with your own rights, where the answers lie in a file, too: choose "docker" for a model
that you do not trust, and for every model that you train.
"""

from __future__ import annotations

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
def log_search(sandbox: str = "local", attempts: int = 1) -> Task:
    """Five questions about three log files.

    Args:
        sandbox: "local" or "docker" (which uses the compose.yaml beside this file).
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
        sandbox=sandbox,
        message_limit=30,
    )
