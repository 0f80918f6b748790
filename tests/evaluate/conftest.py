"""A real local server, for all tests that sample from one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tinker_local import LocalServer


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let sampling clients live as long as the process; the SDK leaves their sockets open."""
    for warning in ("ResourceWarning", "pytest.PytestUnraisableExceptionWarning"):
        item.add_marker(pytest.mark.filterwarnings(f"ignore::{warning}"))


@pytest.fixture(scope="session")
def server(tiny_model: Path) -> Iterator[LocalServer]:
    with LocalServer(tiny_model) as running, running.export_environ():
        yield running
