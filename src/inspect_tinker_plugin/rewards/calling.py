"""Calls the functions that users bring, plain or async."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from inspect_tinker_plugin.errors import RewardError


async def call_plain(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a plain or async function; a plain one in a thread, so that it cannot stall the loop."""
    if _is_async(function):
        return await function(*arguments)
    answer = await asyncio.to_thread(function, *arguments)
    return await answer if isinstance(answer, Awaitable) else answer


def require_one_argument(spec: object, role: str) -> None:
    """Refuse what cannot be called with one argument.

    Raises:
        RewardError: it is not callable, or takes other arguments.
    """
    if not callable(spec) or isinstance(spec, type):
        raise RewardError(
            f"{role}: {spec!r:.80} is neither an expression, an aggregator nor a function"
        )
    try:
        signature = inspect.signature(spec)
    except ValueError:
        return  # a builtin without a signature
    try:
        signature.bind(None)
    except TypeError as ex:
        raise RewardError(f"{role}: {object_name(spec)} must take one argument: {ex}") from ex


def object_name(spec: object) -> str:
    """Name a function or an object for messages."""
    return getattr(spec, "__qualname__", None) or type(spec).__qualname__


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - the method itself, to look at
    )
