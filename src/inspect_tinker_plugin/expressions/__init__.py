"""Expressions: the language in which rewards and tool executors are written."""

from __future__ import annotations

from inspect_tinker_plugin.expressions.language import Language, build, origins
from inspect_tinker_plugin.expressions.syntax import ExpressionError, parse

__all__ = ["ExpressionError", "Language", "build", "origins", "parse"]
