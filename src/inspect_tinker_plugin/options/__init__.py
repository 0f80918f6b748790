"""The options of datasets, episodes and commands, each declared once."""

from __future__ import annotations

from inspect_tinker_plugin.options.declared import (
    COMMANDS,
    DatasetKeywords,
    DatasetOptions,
    EpisodeOptions,
    Option,
    Selection,
    declared_options,
    option,
    options_of,
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
    "option",
    "options_of",
    "read_keywords",
    "spell_out_options",
]
