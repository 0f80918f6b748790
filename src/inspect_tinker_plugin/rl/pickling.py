"""Pickles a live task by value, including objects that ``cloudpickle`` alone cannot send."""

from __future__ import annotations

import importlib
import io
import sys
import weakref
from contextvars import ContextVar
from typing import Any

import cloudpickle

_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)


def dump(value: object) -> bytes:
    """Pickle by value; ``pickle.loads`` reads it.

    Raises:
        Exception: Something inside belongs to this process (an open file, a lock); each kind
            of object raises its own kind of error.
    """
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Replaces the globals that a closure reads by their counterparts in the other process.

    An agent is a function inside a function, which ``cloudpickle`` sends with the globals
    that it reads. Inspect's own are among them: a context variable is looked up again by
    module and name; weak containers (the sessions of an MCP server, say) start empty.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ContextVar):
            home = _home(obj)
            if home is not None:
                return _look_up, home
        if type(obj) in _WEAK:
            return type(obj), ()
        return super().reducer_override(obj)


def _home(variable: ContextVar[Any]) -> tuple[str, str] | None:
    """Find the module of a context variable, and its name there."""
    for module_name, module in list(sys.modules.items()):
        if module_name == "__main__":  # a worker has another one
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is variable:
                return module_name, name
    return None


def _look_up(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
