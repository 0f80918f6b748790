"""Start and stop a local Tinker API server as a subprocess."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Coroutine, Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar

from tinker_local.launch import LOCK, MODULE
from tinker_local.settings import (
    API_KEY,
    LocalConfigError,
    LocalServerError,
    LocalSettings,
    check_installation,
    server_environ,
)

LOG = "server.log"
TEMPORARY = "inspect-rl-local-"
KEPT_SECONDS = 3600.0
"""For this long a temporary folder stays that no server removed, so that its log can be read."""
CHECK_PERIOD = 2.0
"""Seconds between checks that the server is alive, while work uses it."""

T = TypeVar("T")


class LocalServer:
    """A Tinker API server on 127.0.0.1 that lives as long as a ``with`` block.

    SkyRL (https://github.com/NovaSky-AI/SkyRL) does the work, on the CPU, in two processes of
    one process group. The group ends with the block, and also when this process dies without
    leaving it. Training runs and checkpoints are kept in ``state_dir``: a server that is started
    on the same folder again can resume from them.

    Args:
        model: folder of a model and its tokenizer (see `make_tiny_model`). Its absolute path is
            the model's name for clients.
        state_dir: folder for checkpoints, database and log; by default a temporary one, which is
            deleted when the server stops, or an hour later by another if it was killed.
        settings: sizes and limits.

    Raises:
        LocalConfigError: the extra is not installed, or ``model`` is no model folder.
        LocalConfigError: SkyRL is there in an untested release.
        LocalServerError: on entering, when the server does not come up.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        state_dir: str | Path | None = None,
        settings: LocalSettings | None = None,
    ) -> None:
        self.model = Path(model).expanduser().absolute()
        if not (self.model / "config.json").is_file():
            raise LocalConfigError(f"{self.model} is not a model folder: it has no config.json")
        check_installation()  # last: what cannot work anywhere is refused first
        self.settings = settings or LocalSettings()
        self._wanted_state_dir = state_dir
        self._state_dir: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None
        self._owner = 0
        self._port: int | None = None

    @property
    def url(self) -> str:
        """Base URL for the SDK."""
        if self._port is None:
            raise LocalServerError("the local server is not running")
        return f"http://127.0.0.1:{self._port}"

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables that point a client (SDK, cookbook) to this server."""
        return {
            "TINKER_BASE_URL": self.url,
            "TINKER_API_KEY": API_KEY,
            "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1",
        }

    @contextlib.contextmanager
    def export_environ(self) -> Iterator[None]:
        """Set the variables of :attr:`environ` inside a block, here and for new processes."""
        before = {name: os.environ.get(name) for name in self.environ}
        os.environ.update(self.environ)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    @property
    def log(self) -> Path | None:
        """The server's log file, from the first start on."""
        return None if self._state_dir is None else self._state_dir / LOG

    @property
    def pid(self) -> int | None:
        """Process id and process group id of the running server, or None."""
        return None if self._process is None else self._process.pid

    def start(self) -> Self:
        """Start the server and wait until the model is loaded. Blocks for about 20 seconds."""
        if self._process is not None:
            raise LocalServerError("the local server is already running")
        if self._wanted_state_dir is None:
            _remove_left_folders()
            self._state_dir = Path(tempfile.mkdtemp(prefix=TEMPORARY))
        else:
            self._state_dir = Path(self._wanted_state_dir).expanduser().absolute()
        self._owner = os.getpid()
        atexit.register(self.stop)
        try:
            deadline = time.monotonic() + self.settings.start_timeout
            report = self._spawn(self._state_dir)
            try:
                self._port = self._read_port(report, deadline)
            finally:
                os.close(report)
            self._wait_until_ready(deadline)
        except BaseException:
            self.stop(keep_state=True)
            raise
        return self

    def stop(self, *, keep_state: bool = False) -> None:
        """Stop the server and all of its processes. May be called at any time, repeatedly."""
        if self._owner != os.getpid():
            return  # in a forked child that exits: the server belongs to its parent
        atexit.unregister(self.stop)
        process, self._process = self._process, None
        self._port = None
        if process is not None:
            _end_group(process, self.settings.stop_timeout)
        lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            os.close(lifeline)
        if self._wanted_state_dir is None and self._state_dir is not None and not keep_state:
            shutil.rmtree(self._state_dir, ignore_errors=True)
            self._state_dir = None

    def check(self) -> None:
        """Raise `LocalServerError` if the server has stopped by itself."""
        if self._process is None:
            raise LocalServerError("the local server is not running", log=self.log)
        if (code := self._process.poll()) is not None:
            raise LocalServerError(f"the local server has ended with code {code}", log=self.log)

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work that uses the server; cancel it when the server ends by itself.

        Clients of the server would go on trying for minutes.

        Raises:
            LocalServerError: the server has ended.
        """
        running = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait([running, watching], return_when=asyncio.FIRST_COMPLETED)
            if watching.done() and not running.done():
                watching.result()
            return await running
        finally:
            watching.cancel()
            running.cancel()
            await asyncio.gather(running, watching, return_exceptions=True)

    async def _watch(self) -> None:
        """Wait until the server ends, then raise an error."""
        while True:
            await asyncio.sleep(CHECK_PERIOD)
            self.check()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _spawn(self, state: Path) -> int:
        """Start the process; return the descriptor that it reports its port to."""
        life_read, life_write = os.pipe()
        report_read, report_write = os.pipe()
        command = [sys.executable, "-m", MODULE, "api", str(self.model), str(state)]
        command += [str(report_write), json.dumps(asdict(self.settings))]
        try:
            with _open_log(state) as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=life_read,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=server_environ(self.settings),
                    pass_fds=[report_write],
                    start_new_session=True,
                )
        except BaseException:
            os.close(life_write)
            os.close(report_read)
            raise
        finally:
            os.close(life_read)
            os.close(report_write)
        self._lifeline = life_write
        return report_read

    def _read_port(self, report: int, deadline: float) -> int:
        received = b""
        while not received.endswith(b"\n"):
            readable, _, _ = select.select([report], [], [], max(0, deadline - time.monotonic()))
            if not readable:
                raise self._too_late()
            chunk = os.read(report, 4096)
            if not chunk:
                raise LocalServerError("the local server ended while it started", log=self.log)
            received += chunk
        fields = json.loads(received)
        if "error" in fields:
            raise LocalServerError(f"the local server cannot start: {fields['error']}")
        return int(fields["port"])

    def _wait_until_ready(self, deadline: float) -> None:
        while True:
            self.check()
            try:
                with urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                if time.monotonic() > deadline:
                    raise self._too_late() from None
            time.sleep(0.2)

    def _too_late(self) -> LocalServerError:
        return LocalServerError(
            f"the local server was not ready after {self.settings.start_timeout:g} s "
            "(LocalSettings.start_timeout)",
            log=self.log,
        )


def _open_log(state: Path) -> BinaryIO:
    try:
        state.mkdir(parents=True, exist_ok=True)
        return open(state / LOG, "ab")
    except OSError as error:
        raise LocalServerError(
            f"the local server cannot write its records and checkpoints to {state}: "
            f"{error.strerror}"
        ) from error


def _remove_left_folders() -> None:
    """Remove the temporary folders of servers that were killed, or did not start, an hour ago."""
    for folder in Path(tempfile.gettempdir()).glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError), open(folder / LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - (folder / LOG).stat().st_mtime > KEPT_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _end_group(process: subprocess.Popen[bytes], timeout: float) -> None:
    """Ask for an orderly end, then kill the rest of the process group."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout)
    # Also after an orderly end: the group outlives its leader if the engine does.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
