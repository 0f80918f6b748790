"""Inspect's own conformance suite for sandboxes, in the default and in a relaxed configuration."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from inspect_ai.util import SandboxEnvironment
from tests.inspect_docker_pool.conftest import IMAGE, new_pools, take

from inspect_docker_pool.config import DockerPoolConfig

pytestmark = [pytest.mark.docker, pytest.mark.asyncio(loop_scope="module")]

# The suite has no public name; what it exports are plain pytest functions.
_suite = importlib.import_module("inspect_ai.util._sandbox.self_check")
globals().update({name: getattr(_suite, name) for name in _suite.__all__})

CONFIGS: dict[str, dict[str, Any]] = {
    "hardened": {},
    "default-capabilities": {"cap_drop": []},
}

EXPECTED = {
    # A hardened root may not change owners, so it cannot add a user.
    ("hardened", "test_exec_as_user"),
    # With Docker's own capabilities root may read and write whatever the mode says.
    ("default-capabilities", "test_write_text_file_without_permissions"),
    ("default-capabilities", "test_write_binary_file_without_permissions"),
}


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        "hardened",
        pytest.param("default-capabilities", marks=pytest.mark.nightly),
    ],
)
async def shared(request: pytest.FixtureRequest) -> AsyncIterator[SandboxEnvironment]:
    """One container for the whole suite, whose checks leave nothing behind, as Inspect runs it."""
    options = {"image": IMAGE, "warm": 0, **CONFIGS[request.param]}
    with new_pools():
        environment = await take(DockerPoolConfig(**options))
        yield environment
        environment.release()


@pytest.fixture
def sandbox_env(request: pytest.FixtureRequest, shared: SandboxEnvironment) -> SandboxEnvironment:
    config = request.node.callspec.params["shared"]
    if (config, getattr(request.node, "originalname", "")) in EXPECTED:
        request.applymarker(pytest.mark.xfail(strict=True))
    return shared
