"""A command that counts the words of questions: ``inspect rl words TASK``."""

from __future__ import annotations

from typing import Any

import click

from inspect_tinker_plugin.cli import load_task, reported, task_options


@click.command("words")
@task_options
@reported
def words(**choices: Any) -> None:
    """Count the words of every question of TASK."""
    for sample in load_task(choices).task.dataset:
        click.echo(f"{len(str(sample.input).split()):>6}  {sample.id}")
