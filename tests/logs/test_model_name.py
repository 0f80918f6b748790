"""A log names the model that was rolled out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from inspect_tinker_plugin.rl.renderer import model_name
from inspect_tinker_plugin.testing import tokenizer_path


@pytest.mark.parametrize(
    ("made_for", "name"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        (str(Path("/runs/one/tiny-model")), "tiny-model"),
        (str(tokenizer_path()), None),
        (None, None),
    ],
)
def test_the_model_is_the_one_that_the_renderer_was_made_for(
    made_for: str | None, name: str | None
) -> None:
    assert model_name(SimpleNamespace(_model_name=made_for)) == name
