"""Builds the objects that an expression describes, from named factories."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from inspect_tinker_plugin.expressions.syntax import (
    Argument,
    Call,
    ExpressionError,
    Literal,
    Node,
    parse,
)


@dataclass(frozen=True)
class Language:
    """What an expression may name, and how its parts become objects."""

    factories: Mapping[str, Callable[..., Any]]
    """Factories by name, which make an object from the arguments of a call."""

    noun: str
    """What a name stands for, in messages: ``"aggregator"``."""

    error: type[ExpressionError] = ExpressionError
    """The error to raise."""

    score: Callable[[str], Any] | None = None
    """Makes an object of ``score:PATH``; ``None`` where there are no scores."""

    term: Callable[[Any, float], Any] | None = None
    """Makes an object of a part and its weight; ``None`` where there are no weights."""

    clashes: Mapping[str, str] = field(default_factory=dict)
    """Names that cannot be used since several packages claim them, with an explanation."""

    broken: str = ""
    """Text added when a name is unknown: the plugins that failed to load."""

    origins: Mapping[str, str] = field(default_factory=dict)
    """The plugins that names come from, for messages; built-ins are not among them."""


def build(expression: str, language: Language) -> Any:
    """Build the object that an expression describes.

    Raises:
        ExpressionError: the expression is malformed, or does not fit a factory.
    """
    return _Builder(expression, language).node(parse(expression, language.error))


def origins(expression: str, language: Language) -> str:
    """Say which plugins an expression uses: `` (plugin 'acme' of acme-rewards 1.0)``.

    Returns:
        An empty string when everything is built in.
    """
    named = _called(parse(expression, language.error))
    found = dict.fromkeys(language.origins[name] for name in named if name in language.origins)
    return f" ({', '.join(found)})" if found else ""


def _called(node: Node) -> list[str]:
    if not isinstance(node, Call):
        return []
    inner = [name for argument in node.arguments for name in _called(argument.value)]
    return [node.name, *inner]


class _Builder:
    """Turns the tree of one expression into objects."""

    def __init__(self, expression: str, language: Language) -> None:
        self._expression = expression
        self._language = language

    def node(self, node: Node) -> Any:
        if isinstance(node, Literal):
            return node.value
        if isinstance(node, Call):
            return self._call(node)
        if self._language.score is None:
            raise self._fault("a score has no meaning here", node.start, node.end)
        return self._language.score(node.path)

    def _call(self, call: Call) -> Any:
        factory = self._language.factories.get(call.name)
        if factory is None:
            raise self._fault(self._unknown(call.name), call.start, call.start + len(call.name))
        positional = [self._positional(a) for a in call.arguments if a.key is None]
        named: dict[str, Any] = {}
        for argument in call.arguments:
            if argument.key is None:
                continue
            if argument.key in named:
                at = argument.value
                raise self._fault(f"{argument.key!r} is given twice", at.start, at.end)
            named[argument.key] = self.node(argument.value)
        try:
            # The signature's own message is clearer than that of the failed call.
            inspect.signature(factory).bind(*positional, **named)
            return factory(*positional, **named)
        except ExpressionError:
            raise
        except (TypeError, ValueError) as ex:
            raise self._fault(f"{call.name}: {ex}", call.start, call.end) from ex

    def _positional(self, argument: Argument) -> Any:
        value, weight = self.node(argument.value), argument.weight
        if weight is None:
            return value
        if self._language.term is None:
            raise self._fault("a weight has no meaning here", weight.start, weight.end)
        return self._language.term(value, float(weight.value))

    def _unknown(self, name: str) -> str:
        noun, factories = self._language.noun, self._language.factories
        if name in self._language.clashes:
            return self._language.clashes[name]
        close = difflib.get_close_matches(name, factories, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        score = f"; a scorer is written score:{name}" if self._language.score else ""
        known = f"({hint}known: {', '.join(sorted(factories))}{score})"
        return f"unknown {noun} {name!r} {known}{self._language.broken}"

    def _fault(self, problem: str, start: int, end: int) -> ExpressionError:
        error = self._language.error
        return error(problem, expression=self._expression, start=start, end=end)
