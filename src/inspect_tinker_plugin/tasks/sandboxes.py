"""Maps the sandbox specifications of a task to those of a named provider."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inspect_ai.util import SandboxEnvironmentSpec, SandboxEnvironmentType, registry_info

from inspect_tinker_plugin import inspect_internals
from inspect_tinker_plugin.contracts.errors import ConfigError, PluginError
from inspect_tinker_plugin.contracts.sandboxes import SandboxMapper
from inspect_tinker_plugin.contracts.wording import suggestion
from inspect_tinker_plugin.plugins.manager import default_plugins

_HOOK = "inspect_rl_sandbox_providers"

SANDBOX_PROVIDERS: Mapping[str, SandboxMapper] = {
    "docker_pool": lambda spec: SandboxEnvironmentSpec("docker_pool", spec.config),
}
"""The built-in sandbox providers by name; all others in Inspect's registry need no mapping."""


@dataclass(frozen=True)
class ProviderMapping:
    """Providers by the type of sandbox that a task may ask for; picklable, as it holds names."""

    providers: Mapping[str, str]
    """Names of providers by the requested type; ``"*"`` for any other type."""

    def __post_init__(self) -> None:
        for name in self.providers.values():
            _mapper(name)  # raises if it is unknown

    def __call__(self, spec: SandboxEnvironmentSpec) -> SandboxEnvironmentSpec:
        """Map the specification of a task or a sample; types that are not named stay unchanged.

        Raises:
            PluginError: the provider failed, or its result is unknown to Inspect.
        """
        name = self.providers.get(spec.type, self.providers.get("*"))
        if name is None:
            return spec
        origin = default_plugins().catalogue(_HOOK).origins.get(name)
        who = f"sandbox provider {name!r}" + (f" ({origin})" if origin else "")
        try:
            mapped = _mapper(name)(spec)
        except Exception as ex:
            raise PluginError(f"{who} failed on {spec.type!r}: {type(ex).__name__}: {ex}") from ex
        if not isinstance(mapped, SandboxEnvironmentSpec):
            raise PluginError(
                f"{who} gave {mapped!r:.80} for {spec.type!r}, not a SandboxEnvironmentSpec"
            )
        if mapped.type != spec.type and not _known_to_inspect(mapped.type):
            raise PluginError(
                f"{who} gave the type {mapped.type!r}, which is not in "
                "Inspect's registry; register it with @sandboxenv and an inspect_ai entry point"
            )
        return mapped


@dataclass(frozen=True)
class SandboxChoice:
    """What ``sandbox=`` asks for: a value that Inspect resolves, or a mapping to providers."""

    for_inspect: SandboxEnvironmentType | None
    """The value that Inspect resolves as it does ``eval(sandbox=...)``."""

    mapping: ProviderMapping | None
    """Maps the specification of the task and of each sample."""


def choose_sandbox(sandbox: Any) -> SandboxChoice:
    """Interpret ``sandbox=``, for everything that runs episodes.

    Args:
        sandbox: A plugin's provider by name, a mapping of types to providers, or what Inspect
            itself takes (a type that it knows, a specification, a tuple).

    Raises:
        ConfigError: The name is known neither to a plugin nor to Inspect.
    """
    if isinstance(sandbox, Mapping):
        return SandboxChoice(None, ProviderMapping(dict(sandbox)))
    if not isinstance(sandbox, str) or _known_to_inspect(sandbox):
        return SandboxChoice(sandbox, None)
    return SandboxChoice(None, ProviderMapping({"*": sandbox}))


def _mapper(name: object) -> SandboxMapper:
    catalogue = default_plugins().catalogue(_HOOK)
    if not isinstance(name, str):
        raise ConfigError(f"a sandbox provider is given by name, not as {name!r}")
    if name in catalogue.clashes:
        raise ConfigError(f"sandbox provider {catalogue.clashes[name]}")
    if name in catalogue.entries:
        return catalogue.entries[name]
    if _known_to_inspect(name):
        return lambda spec: SandboxEnvironmentSpec(name, spec.config)
    registered = inspect_internals.registry_find(lambda info: info.type == "sandboxenv")
    known = {registry_info(each).name.rpartition("/")[2] for each in registered}
    known = {*catalogue.entries, *(each for each in known if not each.startswith("inspect_rl_"))}
    raise ConfigError(
        f"unknown sandbox provider {name!r}: it is neither registered with Inspect nor given by a "
        f"plugin{catalogue.broken}.{suggestion(name, sorted(known), most=len(known))}"
    )


def _known_to_inspect(name: str) -> bool:
    try:
        inspect_internals.registry_find_sandboxenv(name)
    except ValueError:
        return False
    return True
