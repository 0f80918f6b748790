"""Turns what ``sampler=`` takes into a function that makes samplers."""

from __future__ import annotations

from collections.abc import Callable

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.samplers import Sampler, SamplerSpec
from inspect_tinker_plugin.plugins.expressions import ExpressionError, build, origins
from inspect_tinker_plugin.plugins.manager import Plugins, default_plugins


class SamplerExpressionError(ExpressionError):
    """A sampler expression has a fault; the message and the attributes say where."""

    subject = "sampler expression"


def resolve_sampler(spec: SamplerSpec, *, plugins: Plugins | None = None) -> Callable[[], Sampler]:
    """Turn what ``sampler=`` takes into a function that makes a new sampler, and try it.

    Args:
        spec: ``"curriculum(again=0.1)"``, or a function.
        plugins: Where names are looked up; the installed plugins when not given.

    Raises:
        ConfigError: An unknown name, a malformed expression, or something that makes no sampler.
    """
    if isinstance(spec, str):
        catalogue = (plugins or default_plugins()).catalogue("inspect_rl_samplers")
        language = catalogue.language("sampler", SamplerExpressionError)
        origin = origins(spec, language)

        def make() -> object:
            return build(spec, language)

    elif callable(spec):
        origin, make = "", spec
    else:
        raise ConfigError(
            f"sampler: {spec!r:.80} is neither an expression nor a function that makes a sampler"
        )
    made = make()
    if not isinstance(made, Sampler):
        raise ConfigError(
            f"sampler: {spec!r:.80}{origin} makes {made!r:.80}, which is not a Sampler"
        )
    return make  # type: ignore[return-value]  # as was just checked
