"""The tiny model's folder: the same from the same seed, never overwritten, usable at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from inspect_tinker_plugin.testing import tokenizer_path
from tinker_local import LocalConfigError, make_tiny_model


def tiny_model(folder: Path, seed: int = 0) -> Path:
    return make_tiny_model(folder, tokenizer=tokenizer_path(), seed=seed)


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()  # an empty folder is filled
    one, two = tiny_model(tmp_path / "one"), tiny_model(tmp_path / "two")
    assert weights(one) == weights(two)
    assert weights(one) != weights(tiny_model(tmp_path / "three", seed=1))


def test_making_it_again_changes_nothing_and_another_seed_is_refused(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "deep" / "model")
    before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert tiny_model(tmp_path / "deep" / "model") == folder
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    assert list((tmp_path / "deep").iterdir()) == [folder]
    with pytest.raises(LocalConfigError, match="another kind"):
        tiny_model(folder, seed=7)


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(LocalConfigError, match="is not a tiny model"):
        tiny_model(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_global_random_state_is_untouched(tmp_path: Path) -> None:
    import torch

    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    tiny_model(tmp_path / "model")
    assert torch.rand(1) == expected


def test_transformers_can_run_it(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(tiny_model(tmp_path / "model"))
    ids = AutoTokenizer.from_pretrained(folder)("Hello", return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(ids).logits
    assert logits.shape == (1, ids.shape[1], 2048)
    # Wide enough that some tokens are much likelier than others from the start.
    assert logits.std() > 1.0
