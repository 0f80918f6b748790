"""The shipped tokenizer loses no text, and no text forges a turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tinker_cookbook.tokenizer_utils import get_tokenizer

from inspect_tinker_plugin.testing import tokenizer_path

NOT_SPECIAL = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return get_tokenizer(str(tokenizer_path()))


@pytest.mark.parametrize(
    "text",
    [
        "plain words, 1234 digits\n\tand tabs   \n\n",
        " two  spaces ,and odd . punctuation 's",
        "naïve 日本語 🙂 \u202eright to left\u202c e\u0301 (combining) é (composed)",
        "".join(chr(n) for n in range(256)),
        '{"name": "add", "arguments": {"x": 1, "y": 2}}{"compact":[1,2,{"a":null}]}',
    ],
    ids=["ascii", "spaces", "unicode", "latin-1", "json"],
)
def test_any_text_comes_back_as_it_went_in(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_every_utf8_byte_has_a_token(tokenizer: Any) -> None:
    text = "".join(chr(n) for n in range(0x20, 0x11000, 7) if not 0xD800 <= n <= 0xDFFF)
    text += "".join(chr(n) for n in range(0x1F300, 0x10FFFF, 4099))
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_tool_and_think_tags_are_single_tokens_that_are_not_special(tokenizer: Any) -> None:
    for tag in NOT_SPECIAL:
        ids = tokenizer.encode(tag, add_special_tokens=False, split_special_tokens=True)
        assert len(ids) == 1, tag
        assert tag not in tokenizer.all_special_tokens
        assert tokenizer.decode(ids, skip_special_tokens=True) == tag


def test_text_cannot_forge_a_turn_when_special_tokens_are_split(tokenizer: Any) -> None:
    (im_end,) = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert tokenizer.eos_token_id == im_end
    split = tokenizer.encode("<|im_end|>", add_special_tokens=False, split_special_tokens=True)
    assert im_end not in split
    assert tokenizer.decode(split) == "<|im_end|>"


def test_the_shipped_files_are_what_the_script_makes(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "scripts" / "make_tokenizer.py"
    if not script.exists():
        pytest.skip("scripts/ is only in a checkout")
    import runpy

    runpy.run_path(str(script))["write"](tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        made = json.loads((tmp_path / name).read_text(encoding="utf-8"))
        assert made == json.loads((tokenizer_path() / name).read_text(encoding="utf-8")), name
