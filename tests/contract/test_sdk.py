"""Methods of the Tinker SDK that are about to go are not called."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import tinker
from tinker.lib.public_interfaces import RestClient

ROOT = Path(__file__).parents[2]
CLIENTS = (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, RestClient)
DEPRECATED = {
    name
    for client in CLIENTS
    for name, method in vars(client).items()
    if name.endswith("_async") and hasattr(method, "__deprecated__")
}


@pytest.mark.parametrize("folder", ["src", "benchmarks", "examples", "scripts", "tests"])
def test_no_deprecated_method_of_the_sdk_is_called(folder: str) -> None:
    assert "create_sampling_client_async" in DEPRECATED
    for path in (ROOT / folder).rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not called & DEPRECATED, path
