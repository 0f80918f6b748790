"""What happens with a failed episode: an exception, or a stated penalty per cause."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from inspect_tinker_plugin.errors import Cause, ConfigError

Penalty = float | Literal["raise"]
OnError = Penalty | Mapping[str, Penalty]
"""``"raise"``, one penalty for every cause, or a penalty by cause (others raise).

``inside_sandbox`` is the exception: it costs 0 unless it is named, since a policy that can raise
it at will would otherwise have its bad episodes run again.
"""

_PROVOKED: Mapping[Cause, float] = {Cause.INSIDE_SANDBOX: 0.0}


@dataclass(frozen=True)
class ErrorPolicy:
    """What a failed episode becomes: an exception for the cookbook, or a stated penalty."""

    penalties: Mapping[Cause, float] = field(default_factory=lambda: dict(_PROVOKED))
    """Penalty by cause; a cause that is not listed raises."""

    @classmethod
    def of(cls, on_error: OnError) -> ErrorPolicy:
        """Read ``on_error``.

        Raises:
            ConfigError: An unknown cause, or a penalty that is not a finite number.
        """
        if isinstance(on_error, Mapping):
            given = {_cause(cause): _penalty(value) for cause, value in on_error.items()}
            stated = {**_PROVOKED, **given}
            return cls({cause: value for cause, value in stated.items() if value is not None})
        penalty = _penalty(on_error)
        return cls() if penalty is None else cls(dict.fromkeys(Cause, penalty))

    def penalty(self, cause: Cause) -> float | None:
        """Return the penalty for a cause, ``None`` when it is to be raised."""
        return self.penalties.get(cause)


def _cause(name: str) -> Cause:
    try:
        return Cause(name)
    except ValueError:
        known = ", ".join(Cause)
        raise ConfigError(f"on_error: unknown cause {name!r}; the causes are {known}") from None


def _penalty(value: object) -> float | None:
    if value == "raise":
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"on_error: {value!r} is neither 'raise' nor a finite number")
    return float(value)
