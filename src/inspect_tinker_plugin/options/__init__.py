"""The options of datasets, episodes and commands, each declared once."""

from __future__ import annotations

from inspect_tinker_plugin.options.declared import (
    COMMANDS,
    OLD_NAMES,
    DatasetKeywords,
    DatasetOptions,
    EpisodeOptions,
    Option,
    declared_options,
    documented,
    read_keywords,
    signature_of,
)
from inspect_tinker_plugin.options.selection import Selection

__all__ = [
    "COMMANDS",
    "OLD_NAMES",
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
