"""Inspect's own conformance suite for sandboxes, in the default and in a relaxed configuration."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from inspect_ai.util import SandboxEnvironment

pytestmark = pytest.mark.docker

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


@pytest.fixture(
    params=[
        "hardened",
        pytest.param("default-capabilities", marks=pytest.mark.nightly),
    ]
)
async def sandbox_env(request: pytest.FixtureRequest, open_sandbox: Any) -> SandboxEnvironment:
    if (request.param, getattr(request.node, "originalname", "")) in EXPECTED:
        request.applymarker(pytest.mark.xfail(strict=True))
    environment: SandboxEnvironment = await open_sandbox(**CONFIGS[request.param])
    return environment
