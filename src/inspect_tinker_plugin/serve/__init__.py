"""Episodes for any trainer: it lends a sampler, and gets tokens, rewards and causes back."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inspect_tinker_plugin.serve.results import (
        Branch,
        Failure,
        RolloutResult,
        SampledTurn,
        Span,
    )
    from inspect_tinker_plugin.serve.samplers import (
        Endpoint,
        EndpointSampler,
        Prompt,
        Sampled,
        Sampler,
        SamplerError,
    )
    from inspect_tinker_plugin.serve.service import RolloutService

_HOMES = {
    "results": ("Branch", "Failure", "RolloutResult", "SampledTurn", "Span"),
    "samplers": ("Endpoint", "EndpointSampler", "Prompt", "Sampled", "Sampler", "SamplerError"),
    "service": ("RolloutService",),
}

__all__ = [
    "Branch",
    "Endpoint",
    "EndpointSampler",
    "Failure",
    "Prompt",
    "RolloutResult",
    "RolloutService",
    "Sampled",
    "SampledTurn",
    "Sampler",
    "SamplerError",
    "Span",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"inspect_tinker_plugin.serve.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
