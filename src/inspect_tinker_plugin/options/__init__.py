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
    read_keywords,
    spell_out_options,
)

__all__ = [
    "COMMANDS",
    "DatasetKeywords",
    "DatasetOptions",
    "EpisodeOptions",
    "Option",
    "Selection",
    "declared_options",
    "read_keywords",
    "spell_out_options",
]
