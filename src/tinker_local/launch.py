"""Runs the server's processes: ``python -m tinker_local.launch api|engine``.

The first is started by `server.LocalServer`, the second by the first. Both belong to the same
separate process group, and both end with the process that started the server.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from tinker_local.settings import FOLDER, LocalSettings, check_installation

MODULE = "tinker_local.launch"
LIFELINE = 0
"""Standard input is a pipe that closes with the starting process; the engine inherits it."""
READY = "engine.ready"
LOCK = "lock"


def main(argv: list[str]) -> int:
    """Run the role that ``argv`` names until the server is stopped."""
    end_with_parent(LIFELINE, os.getppid())
    role, *rest = argv
    if role == "engine":
        return _engine(Path(rest[0]), rest[1:])
    model, state, report, settings = rest
    return _api(model, Path(state), int(report), LocalSettings(**json.loads(settings)))


def _report(descriptor: int, **fields: object) -> None:
    """Tell the starter the port, or why there is none, as one line of JSON."""
    os.write(descriptor, json.dumps(fields).encode() + b"\n")
    os.close(descriptor)


def _api(model: str, state: Path, starter: int, settings: LocalSettings) -> int:
    lock = os.open(state / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        reason = f"another local server is running on {state}; give each its own folder"
        _report(starter, error=reason)
        return 1
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # A port that a server has just left can be used, even if the kernel still remembers it.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", settings.port))
    except OSError as ex:
        reason = f"port {settings.port} on 127.0.0.1 cannot be used: {ex.strerror}"
        _report(starter, error=reason)
        return 1
    ready = state / READY
    ready.unlink(missing_ok=True)
    app = _application(model, state, ready, settings)
    _report(starter, port=listener.getsockname()[1])
    _serve(app, listener, settings)
    return 0


def _application(model: str, state: Path, ready: Path, settings: LocalSettings) -> Any:
    from tinker_local.engine import typed_dict_for_pydantic

    with typed_dict_for_pydantic():
        from skyrl.tinker import api
    from skyrl.tinker.config import EngineConfig, config_to_argv

    from tinker_local.protocol import Records, TinkerProtocol, keep_optimizer_flag

    def engine_command(_: object, config: Any) -> list[str]:
        # SkyRL starts its engine through `uv run`; here it uses the running interpreter.
        return [sys.executable, "-m", MODULE, "engine", str(ready), *config_to_argv(config)]

    api._build_uv_run_cmd_engine = engine_command
    keep_optimizer_flag()
    records = Records(database=state / "tinker.db", checkpoints=state / FOLDER)
    records.forget_unfinished()
    config = EngineConfig(
        base_model=model,
        backend="jax",
        backend_config={
            "max_lora_adapters": settings.adapters,
            "max_lora_rank": settings.max_lora_rank,
            "sample_max_num_sequences": settings.sample_batch,
            "train_micro_batch_size": settings.train_batch,
        },
        checkpoints_base=str(records.checkpoints),
        database_url=f"sqlite:///{records.database}",
        session_cleanup_interval_sec=10,
        session_timeout_sec=settings.session_timeout,
    )
    api.app.state.engine_config = config
    return TinkerProtocol(app=api.app, model=model, records=records, engine_ready=ready)


def _serve(app: Any, listener: socket.socket, settings: LocalSettings) -> None:
    import uvicorn

    config = uvicorn.Config(
        app,
        log_level="info",
        access_log=False,
        lifespan="on",
        # Requests for results are held open; they must not delay the end.
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(config).run(sockets=[listener])


def _engine(ready: Path, argv: list[str]) -> int:
    from tinker_local import engine as repairs
    from tinker_local.engine import repair_adapters, repair_shapes

    with repairs.typed_dict_for_pydantic():
        from skyrl.tinker import engine
    repairs.repair_engine()
    repair_shapes()
    repair_adapters()
    run = engine.TinkerEngine.run

    def run_and_tell(self: Any) -> None:
        ready.touch()
        run(self)

    engine.TinkerEngine.run = run_and_tell
    sys.argv = ["skyrl.tinker.engine", *argv]
    engine.main()
    return 0


PERIOD = 1.0
"""Seconds between checks of the parent process."""


def end_with_parent(lifeline: int, parent: int) -> None:
    """Start a thread that kills this process group once the parent is gone.

    Two signs are watched, because each alone can fail: ``lifeline`` is the reading end of a pipe
    whose other end closes with the parent, even by SIGKILL, unless a child that the parent
    forked still holds a copy; and the parent's process id changes when it dies, but not when it
    is alive and merely dropped its server. Nothing is ever written to the pipe.

    Args:
        lifeline: file descriptor of the reading end.
        parent: process id of the parent.
    """
    thread = threading.Thread(
        target=_watch, args=(lifeline, parent), name="watch-parent", daemon=True
    )
    thread.start()


def _watch(lifeline: int, parent: int) -> None:
    while os.getppid() == parent:
        readable, _, _ = select.select([lifeline], [], [], PERIOD)
        if readable and not os.read(lifeline, 1):
            break
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    check_installation()
    sys.exit(main(sys.argv[1:]))
