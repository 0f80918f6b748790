"""Skips what needs an extra that is not installed; one tiny model for all."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.train.runs import Started

import tinker_local as local
from inspect_tinker_plugin.processes import ray_executor
from inspect_tinker_plugin.testing import tokenizer_path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for marker, reason in (("local", local.missing()), ("ray", ray_executor.missing())):
        if reason is None:
            continue
        for item in items:
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return local.make_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny", tokenizer=tokenizer_path()
    )


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a run that starts its server raise an error instead."""

    def refuse(*args: object) -> None:
        raise Started

    monkeypatch.setattr("inspect_tinker_plugin.train.run._start_server", refuse)
