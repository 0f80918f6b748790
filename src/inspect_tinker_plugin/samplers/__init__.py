"""Samplers: which samples a training's next batch has, given the rewards so far."""

from __future__ import annotations

from inspect_tinker_plugin.contracts.hooks import GroupOutcome, SamplePool, Sampler, SamplerSpec
from inspect_tinker_plugin.samplers.builtin import Curriculum
from inspect_tinker_plugin.samplers.state import resolve_sampler, try_sampler

__all__ = [
    "Curriculum",
    "GroupOutcome",
    "SamplePool",
    "Sampler",
    "SamplerSpec",
    "resolve_sampler",
    "try_sampler",
]
