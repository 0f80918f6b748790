"""A real local server, for all tests that sample from one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tinker_local import LocalServer


@pytest.fixture(scope="session")
def server(tiny_model: Path) -> Iterator[LocalServer]:
    with LocalServer(tiny_model) as running, running.exported():
        yield running
