"""A tiny model on a real local server, for all tests that sample from one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from inspect_tinker_plugin.testing import tokenizer_path
from tinker_local import LocalServer, make_tiny_model, missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    for item in items if reason is not None else ():
        if item.get_closest_marker("local"):
            item.add_marker(pytest.mark.skip(reason=str(reason)))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", tokenizer=tokenizer_path())


@pytest.fixture(scope="session")
def server(tiny_model: Path) -> Iterator[LocalServer]:
    with LocalServer(tiny_model) as running, running.exported():
        yield running
