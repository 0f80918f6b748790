"""What Inspect loads through the entry point: names only; implementations are imported lazily."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractAsyncContextManager

from inspect_ai.model import ModelAPI, modelapi
from inspect_ai.util import SandboxEnvironment

from inspect_tinker_plugin import _startup

# Importing the package has done this, unless Inspect was in the middle of its own import then.
_startup.install()

from inspect_tinker_plugin.contracts.policy import POLICY_PROVIDER  # noqa: E402
from inspect_tinker_plugin.contracts.sandboxes import SANDBOX_SERVICES, Watch  # noqa: E402


@modelapi(name=POLICY_PROVIDER)
def policy_provider() -> type[ModelAPI]:
    """Return the provider of the model `rl/...` that logs of rollouts name."""
    from inspect_tinker_plugin.episode.model import PolicyAPI

    return PolicyAPI


@modelapi(name="tinker")
def tinker_provider() -> type[ModelAPI]:
    """Return the provider of models on a Tinker API server: `tinker/PATH`."""
    from inspect_tinker_plugin.contracts.wording import missing_package

    try:
        from inspect_tinker_plugin.evaluate.provider import TinkerAPI
    except ModuleNotFoundError as error:
        if reason := missing_package(error):
            from inspect_tinker_plugin.inspect_internals import PrerequisiteError

            raise PrerequisiteError(reason) from error
        raise
    return TinkerAPI


def serve_agents(
    environments: Collection[SandboxEnvironment], watch: Watch
) -> AbstractAsyncContextManager[None]:
    """Serve the agent programs in an episode's sandboxes."""
    from inspect_tinker_plugin.agents import bridge

    return bridge.serve_agents(environments, watch)


SANDBOX_SERVICES.append(serve_agents)

__all__ = ["policy_provider", "serve_agents", "tinker_provider"]
