"""All that a command may import, for the processes that fork from the one with this module."""

from __future__ import annotations

import tests.logs.rollouts
import tests.train.drill  # noqa: F401
from inspect_ai.model import get_model

import inspect_tinker_plugin.cli.main
import inspect_tinker_plugin.rl.rollouts  # noqa: F401
from inspect_tinker_plugin.testing import load_renderer

get_model("mockllm/model")  # loads the packages that extend Inspect
load_renderer()
