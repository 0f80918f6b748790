"""The model under training: its renderer and tokenizer, and the Tinker API server that has it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from tinker_cookbook.model_info import get_recommended_renderer_name
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer, is_tokenizer_registered

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.errors import ConfigError, RendererError
from inspect_tinker_plugin.contracts.policy import TOKENIZER_FOLDER

if TYPE_CHECKING:
    from tinker_cookbook.completers import TokenCompleter

_PATIENCE = 15.0
"""Seconds until a server has to have accepted a connection."""

_KEYS = ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD")
"""Variables that the SDK takes its key from; `tinker auth login` stores one in a file."""

_NO_HUB = (
    "the tokenizer of {} is not on this machine, and the Hugging Face hub cannot be reached; check "
    "the connection, or name a folder that holds the tokenizer"
)


def make_renderer(
    name: str | None, *, model: str | None, tokenizer: str | None = None, option: str = "renderer"
) -> Renderer:
    """Make a renderer.

    Args:
        name: Name of the renderer; the one that the cookbook recommends for the model when
            ``None``.
        model: Name of the model, which also determines the tokenizer.
        tokenizer: Name or folder of the tokenizer, if not the model's own.
        option: The caller's name for this option, for messages.

    Raises:
        RendererError: There is no such renderer, or none is recommended for the model.
        ConfigError: The tokenizer cannot be loaded, or weights come without a name for it.
    """
    if model is not None and model.startswith("tinker://"):
        given = {option.replace("renderer", "tokenizer"): tokenizer, option: name}
        if missing := [each for each, value in given.items() if value is None]:
            raise ConfigError(f"weights do not name their model: add {' and '.join(missing)}")
    if name is None:
        name = recommended_renderer(str(model), option=option)
    else:
        require_renderer(name, option=option)
    source = tokenizer or str(model)
    loaded = load_tokenizer(source)
    try:
        renderer = get_renderer(name, loaded, model_name=source)
        renderer.get_stop_sequences()  # which some look up only when they are asked
        return renderer
    except Exception as error:
        reason = internals.in_one_line(error)
        raise RendererError(
            f"{option} {name!r} cannot be used with the tokenizer of {source}: {reason}"
        ) from error


def load_tokenizer(source: str) -> Any:
    """Load the tokenizer of a model, by its name or from a folder.

    Raises:
        ConfigError: It cannot be loaded.
    """
    _require_hub(source)
    try:
        return get_tokenizer(source)
    except Exception as error:  # each hub and format raises its own errors
        text = internals.in_one_line(error)
        offline = "connect" in text.lower() or "offline" in text.lower()
        raise ConfigError(
            _NO_HUB.format(source)
            if offline
            else f"the tokenizer of {source} cannot be loaded: {text}"
        ) from error


def recommended_renderer(model: str, *, option: str = "renderer") -> str:
    """Return the renderer that the cookbook recommends for a model."""
    try:
        return str(get_recommended_renderer_name(model))
    except Exception as error:  # unknown organisations and models raise different errors
        raise RendererError(
            f"the cookbook knows no renderer for the model {model!r}; give {option}, e.g. qwen3"
        ) from error


def require_renderer(name: str, *, option: str = "renderer") -> None:
    """Check that a renderer exists, before a tokenizer is loaded for it."""
    try:
        get_renderer(name, None)  # the name is looked at first
    except Exception as error:  # without a tokenizer, most cannot be made
        if f"Unknown renderer: {name}" in str(error):
            raise RendererError(
                f"{option}: there is no renderer {name}; for Qwen models it is qwen3, "
                "qwen3_instruct or qwen3_disable_thinking"
            ) from error


def model_name(renderer: object) -> str | None:
    """Return the model that a renderer was made for: its name, or the last part of its folder.

    ``None`` when the model is not known, or is only the tokenizer of the scripted policy.
    """
    name = getattr(renderer, "_model_name", None)  # set by get_renderer(), for pickling
    if not isinstance(name, str) or not name or Path(name) == TOKENIZER_FOLDER:
        return None
    return Path(name).name if Path(name).is_absolute() else name


def _require_hub(source: str) -> None:
    """Refuse a tokenizer that can only come from the hub when that does not answer.

    The hub's own client would try for a minute, and report every attempt.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE or Path(source).exists() or is_tokenizer_registered(source):
        return
    if source.startswith(("meta-llama/", "thinkingmachines/")):
        return  # the cookbook has other tokenizers for them
    try:
        cached = try_to_load_from_cache(source.partition(":")[0], "tokenizer_config.json")
    except ValueError:  # no name of the hub: the loader says so
        return
    if cached is None and why_unreachable(constants.ENDPOINT) is not None:
        raise ConfigError(_NO_HUB.format(source))


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
    try:
        with httpx.stream("GET", address, timeout=_PATIENCE):
            return None
    except (httpx.UnsupportedProtocol, httpx.InvalidURL):
        return "the address does not begin with http:// or https://"
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        # Certificates and protocols are left to the SDK.
        return None if "SSL" in str(error) else str(error) or "no connection in time"
    except httpx.HTTPError:
        return None


def require_weights(weights: str, *, base_url: str | None) -> None:
    """Check that a server knows the training that made some weights.

    Without this, weights that do not exist show when the first episode is sampled.
    """
    import tinker

    try:
        with rest_client(base_url) as rest:
            rest.get_training_run_by_tinker_path(weights).result()
    except tinker.NotFoundError as error:
        raise ConfigError(
            f"there are no weights {weights}: the server knows no training that made them"
        ) from error
    except (tinker.TinkerError, ValueError):
        return


def context_window(model: str, *, base_url: str | None) -> int | None:
    """Ask a server how many tokens a model takes, prompt and reply together.

    Returns:
        Their number, ``None`` where the server does not say or cannot be asked: its refusal of a
        prompt that is too long says it, later.
    """
    import tinker

    try:
        with rest_client(base_url) as rest:
            if model.startswith("tinker://"):
                model = rest.get_training_run_by_tinker_path(model).result().base_model
            offered = rest.get_server_capabilities().result().supported_models
    except (tinker.TinkerError, ValueError):
        return None
    found = [each.max_context_length for each in offered if each.model_name == model]
    return found[0] if found else None


@contextmanager
def rest_client(base_url: str | None, api_key: str | None = None) -> Iterator[Any]:
    """Give what asks a server about its models and weights."""
    import tinker

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with tinker.ServiceClient(base_url=base_url, api_key=api_key) as service:
            yield service.create_rest_client()


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
