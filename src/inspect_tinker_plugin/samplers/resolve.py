"""Turns what ``sampler=`` takes into a function that makes samplers."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.samplers import GroupOutcome, SamplePool, Sampler, SamplerSpec
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
    return _resolved(spec, plugins)[0]


def try_sampler(spec: SamplerSpec, pool: SamplePool, *, count: int) -> None:
    """Have a new sampler choose a batch, learn from it and choose again, before anything runs.

    Args:
        spec: As for :func:`resolve_sampler`.
        pool: The samples of the training.
        count: Groups per batch.

    Raises:
        ConfigError: It failed, or chose something else; the message names its plugin.
    """
    make, origin = _resolved(spec, None)
    rewards = tuple(float(member % 2) for member in range(pool.group_size))
    try:
        sampler = make()
        sampler.begin(pool)
        for step in range(2):
            for position in choose(sampler, step, count, len(pool.samples)):
                sampler.learn(GroupOutcome(position=position, rewards=rewards, step=step))
        dict(sampler.figures())
    except ConfigError as error:
        raise ConfigError(f"sampler: {spec!r:.80}{origin}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"sampler: {spec!r:.80}{origin} failed: {type(error).__name__}: {error}"
        ) from error


def choose(sampler: Sampler, step: int, count: int, size: int) -> list[int]:
    """Return the positions of a step's samples.

    Raises:
        ConfigError: The sampler chose something else than so many positions.
    """
    chosen = list(sampler.choose(step, count))
    numbers = all(isinstance(each, Integral) and not isinstance(each, bool) for each in chosen)
    if len(chosen) != count or not numbers or not all(0 <= each < size for each in chosen):
        raise ConfigError(
            f"the sampler {type(sampler).__name__} chose {chosen!r:.80}, not {count} "
            f"positions below {size}"
        )
    return [int(position) for position in chosen]


def _resolved(spec: SamplerSpec, plugins: Plugins | None) -> tuple[Callable[[], Sampler], str]:
    """Return what makes a sampler, and its plugin in words."""
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
    return make, origin  # type: ignore[return-value]  # as was just checked
