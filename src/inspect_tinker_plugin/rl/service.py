"""A server with the Tinker API: its key, whether it answers, what it knows of models, a sampler."""

from __future__ import annotations

import http.client
import os
import ssl
import urllib.error
import urllib.request
import warnings
from typing import TYPE_CHECKING

from inspect_tinker_plugin.contracts.errors import ConfigError

if TYPE_CHECKING:
    from tinker_cookbook.completers import TokenCompleter

_PATIENCE = 15.0
"""Seconds until a server has to have accepted a connection."""

_KEYS = ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD")
"""Variables that the SDK takes its key from; `tinker auth login` stores one in a file."""


def no_key(purpose: str, without: str) -> str | None:
    """Return why the Tinker service cannot be used, ``None`` if there is a key for it.

    Args:
        purpose: What the key is needed for, after "to".
        without: What to do without a key, after "or".
    """
    if any(os.environ.get(name) for name in _KEYS) or _is_logged_in():
        return None
    return (
        f"there is no TINKER_API_KEY in the environment: set it to {purpose} the Tinker service, "
        f"or {without}"
    )


def _is_logged_in() -> bool:
    try:
        from tinker.lib._auth_token_provider import ApiKeyAuthProvider

        return ApiKeyAuthProvider.create_from_stored() is not None
    except Exception:  # another release, or a damaged file: the SDK will say so itself
        return False


def require_server(base_url: str | None) -> None:
    """Check that a server accepts connections: the SDK itself would try for five minutes.

    Args:
        base_url: Its address; the one in ``TINKER_BASE_URL`` or the Tinker service when ``None``.

    Raises:
        ConfigError: It does not.
    """
    try:
        from tinker.lib.base_url import resolve_base_url
    except ImportError:  # another release: the SDK will say it, later
        return
    address = resolve_base_url(base_url)
    if (problem := why_unreachable(f"{address}/api/v1/healthz")) is not None:
        raise ConfigError(
            f"no Tinker API server can be reached at {address} ({problem}); check the connection, "
            "and the address in --base-url or TINKER_BASE_URL"
        )


def why_unreachable(address: str) -> str | None:
    """Return why an address does not answer; what else goes wrong is left to its client."""
    if not address.startswith(("http://", "https://")):
        return "the address does not begin with http:// or https://"
    try:
        urllib.request.urlopen(address, timeout=_PATIENCE).close()
    except urllib.error.HTTPError as error:
        error.close()
    except urllib.error.URLError as error:
        # Certificates are not the SDK's: it brings others.
        certificate = isinstance(error.reason, ssl.SSLError)
        return None if certificate else str(error.reason)
    except (OSError, ValueError, http.client.HTTPException):
        return None
    return None


def require_weights(weights: str, *, base_url: str | None) -> None:
    """Check that a server knows the training that made some weights.

    Without this, weights that do not exist show when the first episode is sampled.

    Args:
        weights: Their path, ``tinker://...``.
        base_url: The server's address.

    Raises:
        ConfigError: It does not know it. Whatever else goes wrong is left to their first use.
    """
    import tinker

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            rest = tinker.ServiceClient(base_url=base_url).create_rest_client()
            rest.get_training_run_by_tinker_path(weights).result()
    except tinker.NotFoundError as error:
        raise ConfigError(
            f"there are no weights {weights}: the server knows no training that made them"
        ) from error
    except (tinker.TinkerError, ValueError):
        return


def context_window(model: str, *, base_url: str | None) -> int | None:
    """Ask a server how many tokens a model takes, prompt and reply together.

    Args:
        model: A base model (``Qwen/Qwen3-8B``) or weights (``tinker://...``).
        base_url: The server's address.

    Returns:
        Their number, ``None`` where the server does not say or cannot be asked: its refusal of a
        prompt that is too long says it, later.
    """
    import tinker

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            rest = tinker.ServiceClient(base_url=base_url).create_rest_client()
            if model.startswith("tinker://"):
                model = rest.get_training_run_by_tinker_path(model).result().base_model
            offered = rest.get_server_capabilities().result().supported_models
    except (tinker.TinkerError, ValueError, AttributeError):  # the last by older releases
        return None
    found = [each.max_context_length for each in offered if each.model_name == model]
    return found[0] if found else None


def tinker_policy(
    model: str, *, base_url: str | None, max_tokens: int, temperature: float
) -> TokenCompleter:
    """Sample from a model through the Tinker API.

    Args:
        model: A base model (``Qwen/Qwen3-8B``) or weights (``tinker://...``).
        base_url: Another server than the hosted one.
        max_tokens: Maximum tokens per turn.
        temperature: Sampling temperature.

    Raises:
        ConfigError: The server cannot be reached, or refuses the key or the model.
    """
    import tinker
    from tinker_cookbook.completers import TinkerTokenCompleter

    require_server(base_url)
    weights = model.startswith("tinker://")
    if weights:
        require_weights(model, base_url=base_url)
    try:
        client = tinker.ServiceClient(base_url=base_url)
        sampler = client.create_sampling_client(
            model_path=model if weights else None, base_model=None if weights else model
        ).result()
    except (tinker.TinkerError, ValueError) as error:
        raise ConfigError(f"cannot sample from {model}: {error}") from error
    # The cookbook's completer calls a method of the SDK that is about to go.
    warnings.filterwarnings("ignore", r"(?s).*sample_async\(\) is deprecated", FutureWarning)
    return TinkerTokenCompleter(sampler, max_tokens=max_tokens, temperature=temperature)
