"""What ``tinker/PATH`` names: a checkpoint, a base model, or the weights of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tinker
from tinker_cookbook.checkpoint_utils import CHECKPOINTS_BASE_NAME, RENDERER_NAME_METADATA_KEY
from tinker_cookbook.renderers import Renderer

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.processes import read_rows
from inspect_tinker_plugin.rl.models import (
    context_window,
    make_renderer,
    no_key,
    require_server,
    rest_client,
)

RUN_FILE = "run.json"
"""File of a run's folder with the identity of the run."""

MAX_TOKENS = 2048
"""Tokens per reply where neither the eval nor a run says how many: Inspect's default."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model to sample from, and how; what is ``None`` is asked of the server."""

    weights: str | None = None
    """A checkpoint, ``tinker://...``; the base model without one."""
    base_model: str | None = None
    renderer: str | None = None
    tokenizer: str | None = None
    """Name or folder of the tokenizer, if it is not the base model's."""
    context_window: int | None = None
    """Tokens that the model takes, prompt and reply together."""
    base_url: str | None = None
    """Address of the server; the one in ``TINKER_BASE_URL`` or the Tinker service when ``None``."""
    max_tokens: int = MAX_TOKENS
    temperature: float = 1.0
    run: Path | None = None
    """Folder of the run that made the weights."""
    step: int | None = None
    """Training steps behind the weights of a run."""
    local: bool = False
    """Whether the server is the run's own, of this machine, which has to be started."""
    lora_rank: int = 32

    @property
    def name(self) -> str:
        """The weights, or the base model."""
        return str(self.weights or self.base_model)


def find_source(path: str, *, base_url: str | None = None, has_key: bool = False) -> Source:
    """Find out what a path names; no server is asked, and nothing is loaded.

    Args:
        path: A checkpoint (``tinker://...``), a run's folder with or without ``@STEP``, or a base
            model.
        base_url: Address of the server, if not the run's own or the default one.
        has_key: Whether there is a key for the server already.
    """
    folder, step = split_step(path)
    if path.startswith("tinker://"):
        source = Source(weights=path, base_url=base_url)
    elif (run := Path(folder).expanduser().absolute()).joinpath(RUN_FILE).is_file():
        source = read_run(run, step, base_url=base_url)
    else:
        source = Source(base_model=path, base_url=base_url)
    if has_key or source.local:
        return source
    if problem := no_key("sample from", "name the folder of a run that was trained with --local"):
        if source.run is None and path.startswith(("/", ".", "~")):
            problem = f"{run} is not the folder of a run, which has a {RUN_FILE}; and {problem}"
        raise ConfigError(f"tinker/{path}: {problem}")
    return source


def split_step(path: str) -> tuple[str, str]:
    """Split ``FOLDER@STEP``; the step is empty where none is named, and has no slash."""
    folder, at, step = path.rpartition("@")
    return (folder, step) if at and "/" not in step else (path, "")


def read_run(run: Path, step: str = "", *, base_url: str | None = None) -> Source:
    """Read from a run's folder how its weights are sampled from.

    Args:
        run: The folder, absolute.
        step: Number of training steps behind the weights; the last ones when empty, and the base
            model for 0.
        base_url: Address of the server, if not the run's own.
    """
    identity, config = _read_json(run / RUN_FILE), _read_json(run / "config.json")
    if not {"model", "renderer"} <= identity.keys():
        raise ConfigError(f"{run / RUN_FILE} does not name the model and renderer of a run")
    local = base_url is None and (run / "local-server").is_dir()
    model = str(identity["model"])
    if local and os.path.isabs(model) and not os.path.isdir(model):
        raise ConfigError(
            f"the model of the run {run} is not at {model}: a local run cannot be moved"
        )
    source = Source(
        base_model=model,
        renderer=str(identity["renderer"]),
        context_window=(config.get("dataset_builder") or {}).get("context_window"),
        base_url=base_url if local or base_url else config.get("base_url"),
        max_tokens=int(config.get("max_tokens") or MAX_TOKENS),
        temperature=float(config.get("temperature", 1.0)),
        run=run,
        local=local,
        lora_rank=int(identity.get("LoRA rank") or 0),
    )
    saved = {
        int(row["batch"]): str(row["sampler_path"])
        for row in read_rows(run / CHECKPOINTS_BASE_NAME)
        if row.get("sampler_path") and isinstance(row.get("batch"), int)
    }
    if step == "0":
        return replace(source, step=0)
    steps = ", ".join(map(str, saved)) or "no step"
    known = f"It has weights after {steps}; {run}@0 is the base model."
    if step and (not step.isdecimal() or int(step) not in saved):
        raise ConfigError(f"the run {run} has no weights of step {step!r}. {known}")
    if not saved:
        raise ConfigError(f"the run {run} has no weights yet. {known}")
    chosen = int(step) if step else max(saved)
    return replace(source, weights=saved[chosen], step=chosen)


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True, kw_only=True)
class Connection:
    """What samples from a model."""

    source: Source
    sampler: tinker.SamplingClient
    renderer: Renderer
    window: int | None


_connecting = ThreadPoolExecutor(1, "inspect-rl-connect")
_connections: dict[tuple[Source, str | None], Future[Connection]] = {}
"""Connections, by what they sample from and the key."""
_servers: dict[Path, str] = {}
"""Addresses of the servers that were started here, by the folder of their run."""


def connect(source: Source, *, api_key: str | None) -> Future[Connection]:
    """Connect to a model in a thread, once per process and key: all that sample from it share it.

    The future fails with a ``ConfigError``: the server cannot be reached or has no such model, or
    the renderer does not fit.
    """
    known = _connections.get((source, api_key))
    if known is None or (known.done() and known.exception() is not None):
        known = _connections[source, api_key] = _connecting.submit(_connect, source, api_key)
    return known


def _connect(source: Source, api_key: str | None) -> Connection:
    base_url = source.base_url
    if source.local:
        base_url, api_key = _start_server(source)
    else:
        require_server(base_url)
    service = tinker.ServiceClient(base_url=base_url, api_key=api_key)
    try:
        if source.base_model is None:
            source = _describe_weights(source, base_url, api_key)
        renderer = make_renderer(
            source.renderer, model=source.base_model, tokenizer=source.tokenizer
        )
        window = source.context_window or find_window(str(source.base_model), base_url)
        sampler = service.create_sampling_client(
            model_path=source.weights, base_model=None if source.weights else source.base_model
        ).result()
    except (tinker.TinkerError, ValueError) as error:
        service.close("errored")  # not waited for: the SDK may wait for its heartbeat for ever
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cannot sample from {source.name}: {error}") from error
    return Connection(source=source, sampler=sampler, renderer=renderer, window=window)


def find_obstacle(source: Source) -> str | None:
    """Say what keeps the server of a local run from starting; ``None`` if nothing does."""
    from tinker_local import SERVER_FOLDER, missing

    assert source.run is not None
    folder = source.run / SERVER_FOLDER
    if os.access(folder, os.W_OK):
        return missing()
    return missing() or f"its server works in {folder}, which cannot be written: make it writable"


def _start_server(source: Source) -> tuple[str, str]:
    """Start the server of a local run, which serves all its weights and ends with this process."""
    from tinker_local import SERVER_FOLDER, LocalServer, LocalServerError, LocalSettings
    from tinker_local.settings import API_KEY

    run = source.run
    assert run is not None
    if run not in _servers:
        settings = LocalSettings(max_lora_rank=max(LocalSettings().max_lora_rank, source.lora_rank))
        server = LocalServer(
            str(source.base_model), state_dir=run / SERVER_FOLDER, settings=settings
        )
        try:
            _servers[run] = server.start().url
        except LocalServerError as error:
            raise ConfigError(
                f"cannot sample from {source.name}, whose server works in the run's folder, for "
                f"one process: {error}"
            ) from error
    return _servers[run], API_KEY


def _describe_weights(source: Source, base_url: str | None, api_key: str | None) -> Source:
    """Ask the server for the base model of some weights, and for the renderer of their training."""
    training_id = source.name.removeprefix("tinker://").partition("/")[0]
    try:
        with rest_client(base_url, api_key) as rest:
            training = rest.get_training_run(training_id).result()
    except tinker.NotFoundError as error:
        raise ConfigError(
            f"there are no weights {source.name}: the server knows no training that made them"
        ) from error
    said = (training.user_metadata or {}).get(RENDERER_NAME_METADATA_KEY)
    return replace(source, base_model=training.base_model, renderer=source.renderer or said)


def find_window(model: str, base_url: str | None) -> int | None:
    """Return how many tokens a model takes, ``None`` where its folder or server does not say it."""
    if os.path.isdir(model):
        from tinker_local import context_length

        return context_length(model)
    return context_window(model, base_url=base_url)
