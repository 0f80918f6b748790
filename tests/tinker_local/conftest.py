"""One running server for all tests that only talk to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tinker_local import LocalServer


@pytest.fixture(scope="session")
def local_server(tiny_model: Path) -> Iterator[LocalServer]:
    with LocalServer(tiny_model) as server, server.export_environ():
        yield server
