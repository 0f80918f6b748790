"""Make the folder of a tiny Qwen3 model that a laptop's CPU can train."""

from __future__ import annotations

from pathlib import Path

TOKENIZER_FOLDER = Path(__file__).resolve().parents[1] / "testing_data" / "tokenizer"
"""The byte-level tokenizer that is shipped with the package (2048 tokens)."""
