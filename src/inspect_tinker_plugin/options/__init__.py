"""The options of datasets, episodes and commands, each declared once."""

from __future__ import annotations

from inspect_tinker_plugin.options.declared import (
    COMMANDS,
    DatasetOptions,
    EpisodeOptions,
    Selection,
)
from inspect_tinker_plugin.options.keywords import (
    DatasetKeywords,
    Option,
    declared_options,
    documented,
    read_keywords,
    signature_of,
)

__all__ = [
    "COMMANDS",
    "DatasetKeywords",
    "DatasetOptions",
    "EpisodeOptions",
    "Option",
    "Selection",
    "declared_options",
    "documented",
    "read_keywords",
    "signature_of",
]
