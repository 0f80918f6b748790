"""Runs that end before they start a server."""

from __future__ import annotations

import pytest
from tests.train.runs import Started


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a run that starts its server raise an error instead."""

    def refuse(*args: object) -> None:
        raise Started

    monkeypatch.setattr("inspect_tinker_plugin.train.run._start_server", refuse)
