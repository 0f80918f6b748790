"""The former home of sample stages: ``inspect_tinker_plugin.plugins`` has them for plugins."""

from __future__ import annotations

from inspect_tinker_plugin.plugins.contracts import SampleStage
from inspect_tinker_plugin.tasks.samples import SelectedSamples, select_samples
from inspect_tinker_plugin.tasks.selection import Selection

__all__ = ["SampleStage", "SelectedSamples", "Selection", "select_samples"]
