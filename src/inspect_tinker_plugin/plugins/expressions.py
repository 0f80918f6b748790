"""Expressions: the language in which rewards, tool executors, samplers and probes are written.

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

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.wording import suggestion

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.])
    | (?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    | (?P<name>[^\W\d][\w./-]*)
    | (?P<mark>[(),=:])
    )""",
    re.VERBOSE,
)

_TRUTH = {"true": True, "false": False}


class ExpressionError(ConfigError):
    """An expression has a fault; the message and the attributes say where.

    Attributes:
        expression: the whole expression.
        start: index of the first character at fault.
        end: index after the last one.
    """

    def __init__(self, problem: str, *, noun: str, expression: str, start: int, end: int) -> None:
        marked = f"{expression[:start]}»{expression[start:end]}«{expression[end:]}"
        super().__init__(f"{noun} expression {marked}, character {start + 1}: {problem}")
        self.expression = expression
        self.start = start
        self.end = end
        self._rebuild = partial(
            type(self), problem, noun=noun, expression=expression, start=start, end=end
        )

    def __reduce__(self) -> tuple[object, ...]:
        return self._rebuild, ()


@dataclass(frozen=True)
class Catalogue:
    """Everything that the plugins provide by name under one hook."""

    noun: str
    """What a name stands for, in messages: ``"reward"``."""

    entries: Mapping[str, Callable[..., Any]]
    """The usable objects, by name: factories, which expressions call."""

    clashes: Mapping[str, str]
    """Names that several packages claim, with an explanation."""

    origins: Mapping[str, str]
    """The plugin of each name, in words; those of this package are left out."""

    broken: str
    """A sentence about plugins that could not be loaded; empty when there are none."""


@dataclass(frozen=True)
class Built:
    """What an expression describes."""

    value: Any

    origin: str
    """The plugins that it uses, as `` (plugin 'acme' of acme-rewards 1.0)``; empty if it is all
    built in."""


def build(
    expression: str,
    catalogue: Catalogue,
    *,
    score: Callable[[str], Any] | None = None,
    term: Callable[[Any, float], Any] | None = None,
) -> Built:
    """Build the object that an expression describes.

    Args:
        expression: The expression.
        catalogue: What it may name.
        score: Makes an object of ``score:PATH``, where there are scores.
        term: Makes an object of a part and its weight, where there are weights.

    Raises:
        ExpressionError: the expression is malformed, or does not fit a factory.
    """
    builder = _Builder(expression, catalogue, score, term)
    value = builder.build()
    origins = ", ".join(dict.fromkeys(builder.origins))
    return Built(value, f" ({origins})" if origins else "")


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    start: int
    end: int


class _Builder:
    """Builds while it parses: recursive descent with one token of lookahead."""

    def __init__(
        self,
        expression: str,
        catalogue: Catalogue,
        score: Callable[[str], Any] | None,
        term: Callable[[Any, float], Any] | None,
    ) -> None:
        self.origins: list[str] = []
        self._expression = expression
        self._catalogue = catalogue
        self._make_score = score
        self._make_term = term
        self._tokens = self._scan()
        self._index = 0

    def build(self) -> Any:
        first = self._next
        if first.kind != "name" or first.text in _TRUTH:
            raise self._fault("a name was expected", first)
        value = self._value()
        if self._next.kind != "end":
            raise self._fault("nothing was expected after the expression", self._next)
        return value

    def _value(self) -> Any:
        token = self._take()
        if token.kind == "number":
            whole = re.fullmatch(r"[+-]?\d+", token.text)
            return int(token.text) if whole else float(token.text)
        if token.kind == "string":
            return _unquote(token.text)
        if token.kind != "name":
            raise self._fault("a name or a value was expected", token)
        if token.text == "score" and self._next_is(":"):
            return self._score(token)
        return _TRUTH[token.text] if token.text in _TRUTH else self._call(token)

    def _score(self, head: _Token) -> Any:
        self._take()  # the colon
        path = self._take()
        if path.kind not in ("name", "string"):
            raise self._fault("a scorer's name was expected after 'score:'", path)
        if self._make_score is None:
            raise self._fault("a score has no meaning here", head)
        return self._make_score(_unquote(path.text) if path.kind == "string" else path.text)

    def _call(self, name: _Token) -> Any:
        positional: list[Any] = []
        named: dict[str, Any] = {}
        if self._next_is("("):
            self._take()
            while not self._next_is(")"):
                self._argument(positional, named)
                if self._next_is(","):
                    self._take()
                elif not self._next_is(")"):
                    raise self._fault("',' or ')' was expected", self._next)
            self._take()
        factory = self._catalogue.entries.get(name.text)
        if factory is None:
            raise self._fault(self._explain_unknown(name.text), name)
        origin = self._catalogue.origins.get(name.text)
        self.origins += [origin] if origin else []
        call = _Token("call", "", name.start, self._tokens[self._index - 1].end)
        try:
            # The signature's own message is clearer than that of the failed call.
            inspect.signature(factory).bind(*positional, **named)
            return factory(*positional, **named)
        except (Exception, SystemExit) as ex:
            is_refusal = isinstance(ex, TypeError | ValueError)
            problem = f"{name.text}: {ex}" if is_refusal else f"{name.text} raised {ex!r}"
            raise self._fault(problem + (f" ({origin})" if origin else ""), call) from ex

    def _argument(self, positional: list[Any], named: dict[str, Any]) -> None:
        head = self._next
        if head.kind in ("name", "string") and self._next_is("=", ahead=1):
            key = _unquote(head.text) if head.kind == "string" else head.text
            self._index += 2
            if key in named:
                raise self._fault(f"{key!r} is given twice", head)
            named[key] = self._value()
            return
        value = self._value()
        if not self._next_is("="):
            positional.append(value)
            return
        equals = self._take()
        if head.kind != "name" or head.text in _TRUTH:
            raise self._fault("only a name or a call stands before '='", equals)
        token = self._next
        weight = self._value()
        if token.kind != "number":
            raise self._fault("a weight (a number) was expected", token)
        if self._make_term is None:
            raise self._fault("a weight has no meaning here", token)
        positional.append(self._make_term(value, float(weight)))

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
        return [*tokens, _Token("end", "", end, end)]

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

    def _explain_unknown(self, name: str) -> str:
        known = self._catalogue
        if name in known.clashes:
            return known.clashes[name]
        score = f" A scorer is written score:{name}." if self._make_score else ""
        hint = suggestion(name, sorted(known.entries), most=len(known.entries))
        return f"unknown {known.noun} {name!r}{known.broken}.{hint}{score}"

    def _fault(self, problem: str, at: _Token) -> ExpressionError:
        return ExpressionError(
            problem,
            noun=self._catalogue.noun,
            expression=self._expression,
            start=at.start,
            end=at.end,
        )


def _unquote(text: str) -> str:
    """Remove the quotes; a backslash only escapes a quote, so patterns stay readable."""
    quote = text[0]
    return text[1:-1].replace(f"\\{quote}", quote)
