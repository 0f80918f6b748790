"""Compose files as evaluations have them: each is read as compose reads it, or refused by name."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
from tests.inspect_docker_pool.composed import (
    EVALS_VERSION,
    PAGE,
    evals_files,
    refusal,
    table,
)

from inspect_docker_pool.compose import parse_config

SHAPES = Path(__file__).parent / "shapes"

REFUSED = {
    "gpu": "deploy.devices",
    "no-default": "no service is named 'default'",
    "privileged": "privileged",
    "written-by-the-policy": "can be written",
}

pytestmark = pytest.mark.usefixtures("compose_plugin")


@pytest.mark.parametrize("name", sorted(path.stem for path in SHAPES.glob("*.yaml")))
def test_a_shape_is_read_as_compose_reads_it_or_refused_by_name(name: str) -> None:
    why = refusal(SHAPES / f"{name}.yaml")
    assert (why is None) == (name not in REFUSED), why
    assert REFUSED.get(name, "") in (why or "")


def test_servers_get_what_compose_gives_them_and_the_sandbox_does_not() -> None:
    agent, *servers = parse_config(str(SHAPES / "internal-network.yaml")).services
    assert (agent.service, agent.is_server) == ("attacker", False)
    assert (agent.hardening.cap_drop, agent.hardening.no_new_privileges) == (("ALL",), True)
    for server in servers:
        assert server.is_server
        assert (server.hardening.cap_drop, server.hardening.no_new_privileges) == ((), False)
        assert server.limits == agent.limits or server.service == "db", "limits hold for all"


def test_what_is_awaited_to_complete_is_no_sandbox() -> None:
    services = parse_config(str(SHAPES / "included.yaml")).services
    assert {each.service: each.completes for each in services} == {
        "default": False, "chat": False, "mongodb": False, "restore": True
    }  # fmt: skip


@pytest.mark.nightly
def test_the_table_of_inspect_evals_is_true() -> None:
    files = evals_files()
    if not files or importlib.metadata.version("inspect-evals") != EVALS_VERSION:
        pytest.skip(f"inspect-evals {EVALS_VERSION} is not installed (pip install --no-deps)")
    assert table(files) in PAGE.read_text(), "run scripts/write_compose_table.py"
