"""Expressions: the language in which rewards and tool executors are written.

For example ``length(weighted(accuracy=0.8, format=0.2), target=400)`` or ``limited(timeout=10)``.

The grammar::

    expression = call | score
    call       = NAME [ "(" [ argument { "," argument } [ "," ] ] ")" ]
    score      = "score:" PATH
    argument   = value | PATH "=" value | expression "=" NUMBER
    value      = NUMBER | STRING | "true" | "false" | expression

``NAME`` is the name of an aggregator (or an executor); ``mean`` is ``mean()``. ``PATH`` is the name
of an argument, or of a scorer, with ``.key`` for one key of a dict score; one with other
characters than letters, digits and ``_-./`` goes in quotes. Scores and weights exist in
reward expressions only.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from inspect_tinker_plugin.contracts.errors import ConfigError

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.])
    | (?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    | (?P<name>[^\W\d][\w./-]*)
    | (?P<mark>[(),=:])
    )""",
    re.VERBOSE,
)


class ExpressionError(ConfigError):
    """An expression has a fault; the message and the attributes say where.

    Attributes:
        expression: the whole expression.
        start: index of the first character at fault.
        end: index after the last one.
    """

    subject = "expression"

    def __init__(self, problem: str, *, expression: str, start: int, end: int) -> None:
        marked = f"{expression[:start]}»{expression[start:end]}«{expression[end:]}"
        super().__init__(f"{self.subject}, character {start + 1}: {problem}, in {marked}")
        self.problem = problem
        self.expression = expression
        self.start = start
        self.end = end

    def __reduce__(self) -> tuple[object, ...]:
        rebuild = partial(type(self), expression=self.expression, start=self.start, end=self.end)
        return rebuild, (self.problem,)


@dataclass(frozen=True)
class Literal:
    """A number, a string or a truth value."""

    value: float | int | str | bool
    start: int
    end: int


@dataclass(frozen=True)
class ScoreRef:
    """``score:PATH``."""

    path: str
    start: int
    end: int


@dataclass(frozen=True)
class Argument:
    """One argument of a call: a value, alone, under a name, or with a weight."""

    value: Node
    key: str | None = None
    """Set for ``key=value``."""
    weight: Literal | None = None
    """Set for ``expression=number``."""


@dataclass(frozen=True)
class FactoryCall:
    """An aggregator's name with its arguments."""

    name: str
    arguments: tuple[Argument, ...]
    start: int
    end: int


Node = Literal | ScoreRef | FactoryCall


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    start: int
    end: int


def parse(
    expression: str, error: type[ExpressionError] = ExpressionError
) -> FactoryCall | ScoreRef:
    """Parse a whole expression into a tree with positions.

    Raises:
        ExpressionError: it does not follow the grammar.
    """
    return _Parser(expression, error).whole()


class _Parser:
    """Recursive descent with one token of lookahead."""

    def __init__(self, expression: str, error: type[ExpressionError]) -> None:
        self._expression = expression
        self._error = error
        self._tokens = list(self._scan())
        self._index = 0

    def whole(self) -> FactoryCall | ScoreRef:
        node = self._value()
        if isinstance(node, Literal):
            raise self._fault("a name was expected", node)
        if self._next.kind != "end":
            raise self._fault("nothing was expected after the expression", self._next)
        return node

    def _value(self) -> Node:
        token = self._take()
        if token.kind == "number":
            text = token.text
            number = int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
            return Literal(number, token.start, token.end)
        if token.kind == "string":
            return Literal(_unquoted(token.text), token.start, token.end)
        if token.kind != "name":
            raise self._fault("a name or a value was expected", token)
        if token.text == "score" and self._next_is(":"):
            self._take()
            return self._score(token)
        if token.text in {"true", "false"}:
            return Literal(token.text == "true", token.start, token.end)
        if self._next_is("("):
            return self._call(token)
        return FactoryCall(token.text, (), token.start, token.end)

    def _score(self, head: _Token) -> ScoreRef:
        token = self._take()
        if token.kind == "name":
            return ScoreRef(token.text, head.start, token.end)
        if token.kind == "string":
            return ScoreRef(_unquoted(token.text), head.start, token.end)
        raise self._fault("a scorer's name was expected after 'score:'", token)

    def _call(self, name: _Token) -> FactoryCall:
        self._take()  # the parenthesis
        arguments: list[Argument] = []
        while not self._next_is(")"):
            arguments.append(self._argument())
            if self._next_is(","):
                self._take()
            elif not self._next_is(")"):
                raise self._fault("',' or ')' was expected", self._next)
        return FactoryCall(name.text, tuple(arguments), name.start, self._take().end)

    def _argument(self) -> Argument:
        named = self._next.kind == "name"
        called = named and (self._next_is("(", ahead=1) or self._next_is(":", ahead=1))
        node = self._value()
        if not self._next_is("="):
            return Argument(node)
        equals = self._take()
        if called:
            weight = self._value()
            if not isinstance(weight, Literal) or isinstance(weight.value, str | bool):
                raise self._fault("a weight (a number) was expected", weight)
            return Argument(node, weight=weight)
        if isinstance(node, FactoryCall):
            return Argument(self._value(), key=node.name)
        if isinstance(node, Literal) and isinstance(node.value, str):
            return Argument(self._value(), key=node.value)
        raise self._fault("only a name or a call stands before '='", equals)

    def _scan(self) -> list[_Token]:
        tokens: list[_Token] = []
        position, end = 0, len(self._expression.rstrip())
        while position < end:
            match = _TOKEN.match(self._expression, position)
            if match is None or match.lastgroup is None:
                start = end - len(self._expression[position:end].lstrip())
                bad = _Token("bad", self._expression[start], start, start + 1)
                hint = "this text never ends" if bad.text in "'\"" else "unexpected character"
                raise self._fault(hint, bad)
            kind = match.lastgroup
            tokens.append(_Token(kind, match[kind], match.start(kind), match.end(kind)))
            position = match.end()
        tokens.append(_Token("end", "", end, end))
        return tokens

    @property
    def _next(self) -> _Token:
        return self._tokens[self._index]

    def _next_is(self, mark: str, *, ahead: int = 0) -> bool:
        token = self._tokens[min(self._index + ahead, len(self._tokens) - 1)]
        return token.kind == "mark" and token.text == mark

    def _take(self) -> _Token:
        token = self._next
        if token.kind != "end":
            self._index += 1
        return token

    def _fault(self, problem: str, at: _Token | Node) -> ExpressionError:
        return self._error(problem, expression=self._expression, start=at.start, end=at.end)


def _unquoted(text: str) -> str:
    """Remove the quotes; a backslash only escapes a quote, so patterns stay readable."""
    quote = text[0]
    return text[1:-1].replace(f"\\{quote}", quote)


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
    if not isinstance(node, FactoryCall):
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
        if isinstance(node, FactoryCall):
            return self._call(node)
        if self._language.score is None:
            raise self._fault("a score has no meaning here", node.start, node.end)
        return self._language.score(node.path)

    def _call(self, call: FactoryCall) -> Any:
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
        except Exception as ex:  # a mistake of whoever wrote it
            origin = self._language.origins.get(call.name)
            problem = f"{call.name} raised {ex!r}" + (f" ({origin})" if origin else "")
            raise self._fault(problem, call.start, call.end) from ex

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
