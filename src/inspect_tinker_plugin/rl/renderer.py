"""The renderer of a model: a named one, or the one that the cookbook recommends."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from pathlib import Path

from tinker_cookbook.model_info import get_recommended_renderer_name
from tinker_cookbook.renderers import Renderer, get_registered_renderer_names, get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer, is_tokenizer_registered

from inspect_tinker_plugin.contracts.errors import ConfigError, RendererError
from inspect_tinker_plugin.contracts.policy import TOKENIZER_FOLDER
from inspect_tinker_plugin.contracts.wording import suggestion
from inspect_tinker_plugin.rl.service import why_unreachable


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
    _require_hub(source)
    try:
        loaded = get_tokenizer(source)
    except Exception as error:  # each hub and format raises its own errors
        raise ConfigError(_why_no_tokenizer(source, error)) from error
    try:
        return get_renderer(name, loaded, model_name=source)
    except Exception as error:
        raise RendererError(
            f"renderer {name!r} does not fit the tokenizer of {source}: {_one_line(error)}"
        ) from error


def recommended_renderer(model: str, *, option: str = "renderer") -> str:
    """Return the renderer that the cookbook recommends for a model.

    Raises:
        RendererError: It recommends none; the message says which option to give.
    """
    try:
        return str(get_recommended_renderer_name(model))
    except Exception as error:  # unknown organisations and models raise different errors
        raise RendererError(
            f"the cookbook knows no renderer for the model {model!r}; give {option}, e.g. qwen3"
        ) from error


def require_renderer(name: str, *, option: str = "renderer") -> None:
    """Check that a renderer exists, before a tokenizer is loaded for it.

    Raises:
        RendererError: It does not exist; the message lists those that do.
    """
    known = renderer_names()
    if known and name not in known:
        raise RendererError(
            f"{option}: there is no renderer {name}.{suggestion(name, known, most=0)} "
            f"There is {', '.join(known)}."
        )


def model_name(renderer: object) -> str | None:
    """Return the model that a renderer was made for: its name, or the last part of its folder.

    ``None`` when the model is not known, or is only the tokenizer of the scripted policy.
    """
    name = getattr(renderer, "_model_name", None)  # set by get_renderer(), for pickling
    if not isinstance(name, str) or not name or Path(name) == TOKENIZER_FOLDER:
        return None
    return Path(name).name if Path(name).is_absolute() else name


def renderer_names() -> list[str]:
    """Return the names that ``get_renderer()`` accepts; none when its source cannot be read."""
    return sorted({*_built_in_names(), *get_registered_renderer_names()})


@functools.cache
def _built_in_names() -> frozenset[str]:
    # The cookbook has no list of names: its factory compares the name with one after another.
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(get_renderer)))
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    compared = [
        each.comparators[0]
        for each in ast.walk(tree)
        if isinstance(each, ast.Compare)
        and isinstance(each.left, ast.Name)
        and each.left.id == "name"
    ]
    return frozenset(str(each.value) for each in compared if isinstance(each, ast.Constant))


def _require_hub(source: str) -> None:
    """Refuse a tokenizer that can only come from the hub when that does not answer.

    The hub's own client would try for a minute, and report every attempt.

    Raises:
        ConfigError: It does not.
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


_NO_HUB = (
    "the tokenizer of {} is not on this machine, and the Hugging Face hub cannot be reached; check "
    "the connection, or name a folder that holds the tokenizer"
)


def _why_no_tokenizer(source: str, error: Exception) -> str:
    text = _one_line(error)
    if "connect" in text.lower() or "offline" in text.lower():
        return _NO_HUB.format(source)
    return f"the tokenizer of {source} cannot be loaded: {text}"


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
