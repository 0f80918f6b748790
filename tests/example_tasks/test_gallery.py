"""The gallery: its notebook runs, and each example keeps what its page shows."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
from examples.__main__ import EXAMPLES
from examples.curves import draw
from nbclient import NotebookClient

GALLERY = Path(__file__).parents[2] / "examples"


@pytest.mark.nightly
def test_the_notebook_goes_from_a_task_to_its_reward() -> None:
    notebook = nbformat.read(GALLERY / "first_dataset.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    NotebookClient(notebook, timeout=250, kernel_name="python3").execute(cwd=str(GALLERY))
    printed = ["".join(out.get("text", "") for out in cell.get("outputs", ()))
               for cell in notebook.cells]  # fmt: skip
    assert any("There are 12." in text for text in printed)
    assert any("[0.8, 0.8]" in text for text in printed)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_keeps_its_rewards_curve_and_pages(name: str) -> None:
    folder = GALLERY / name
    expected = json.loads((folder / "expected.json").read_text())
    assert set(expected) == set(EXAMPLES[name].runs)
    for rewards in expected.values():
        assert rewards[-1] > rewards[0] + 0.2
    assert (folder / "curve.svg").read_text() == draw(expected, {})
    page = (folder / "README.md").read_text()
    for kept in (*EXAMPLES[name].pages, "curve.svg"):
        assert (folder / kept).exists()
        assert f"({kept})" in page


def test_a_second_run_is_drawn_over_the_expected_one() -> None:
    both = draw({"run": [0.0, 1.0]}, {"run": [0.5, 0.5]})
    assert both.count("<polyline") == 2
    assert both.count("stroke-dasharray") == 1
