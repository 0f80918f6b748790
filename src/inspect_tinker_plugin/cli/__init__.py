"""The commands of ``inspect rl``, one module each, imported when it is called.

What commands share is also for those that plugins add (``inspect_rl_commands``).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inspect_tinker_plugin.cli.display import clean_text, print_to, table_console
    from inspect_tinker_plugin.cli.group_rollout import roll_groups
    from inspect_tinker_plugin.cli.options import (
        dataset_choices,
        dataset_options,
        load_task,
        parse_args,
        price_option,
        task_options,
        test_task_options,
    )
    from inspect_tinker_plugin.cli.reporting import (
        EXIT_ERROR,
        EXIT_INTERRUPTED,
        EXIT_PARTIAL,
        progress_bar,
        quiet_stdout,
        reported,
    )

_HOMES = {
    "EXIT_ERROR": "cli.reporting",
    "EXIT_INTERRUPTED": "cli.reporting",
    "EXIT_PARTIAL": "cli.reporting",
    "clean_text": "cli.display",
    "dataset_choices": "cli.options",
    "dataset_options": "cli.options",
    "load_task": "cli.options",
    "parse_args": "cli.options",
    "price_option": "cli.options",
    "print_to": "cli.display",
    "progress_bar": "cli.reporting",
    "quiet_stdout": "cli.reporting",
    "reported": "cli.reporting",
    "roll_groups": "cli.group_rollout",
    "table_console": "cli.display",
    "task_options": "cli.options",
    "test_task_options": "cli.options",
}

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
    "reported",
    "roll_groups",
    "table_console",
    "task_options",
    "test_task_options",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"inspect_tinker_plugin.{home}"), name)
    globals()[name] = value
    return value
