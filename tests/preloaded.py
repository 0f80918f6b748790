"""All that a command may import, for the processes that fork from the one with this module."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

import tests.logs.rollouts
import tests.train.drill  # noqa: F401
from inspect_ai.model import get_model

import inspect_tinker_plugin.cli.main
import inspect_tinker_plugin.rl.rollouts  # noqa: F401
from inspect_tinker_plugin.testing import load_renderer

with suppress(ImportError):  # private: what every episode imports, four seconds with their clients
    for _provider in ("anthropic", "openai"):
        import_module(f"inspect_ai.model._providers.{_provider}")
get_model("mockllm/model")  # loads the packages that extend Inspect
load_renderer()
