"""The commands of ``inspect rl``, and what they share with commands that plugins add.

A plugin adds commands by the hook ``inspect_rl_commands``.
"""

from __future__ import annotations

from inspect_tinker_plugin.cli.options import (
    dataset_choices,
    dataset_options,
    load_task,
    parse_args,
    price_option,
    renderer_options,
    task_options,
    test_task_options,
)
from inspect_tinker_plugin.cli.reporting import (
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    EXIT_PARTIAL,
    print_to,
    progress_bar,
    quiet_stdout,
    reported,
    table_console,
)
from inspect_tinker_plugin.cli.rollout import roll_groups
from inspect_tinker_plugin.contracts.wording import clean_text
from inspect_tinker_plugin.processes.workers import run_in_loop

__all__ = [
    "EXIT_ERROR",
    "EXIT_INTERRUPTED",
    "EXIT_PARTIAL",
    "clean_text",
    "dataset_choices",
    "dataset_options",
    "load_task",
    "parse_args",
    "price_option",
    "print_to",
    "progress_bar",
    "quiet_stdout",
    "renderer_options",
    "reported",
    "roll_groups",
    "run_in_loop",
    "table_console",
    "task_options",
    "test_task_options",
]
