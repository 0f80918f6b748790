"""The settings of a local server, its folders and errors, and whether it can run here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

SUPPORTED_SKYRL = "0.2.0"
"""The release of SkyRL that `protocol` and `engine` were written against and tested with."""

INSTALL = "pip install torch && pip install 'inspect-tinker-plugin[local]'"

API_KEY = "tml-local"
"""The server asks for no key, but the SDK insists on one with this prefix."""


SERVER_FOLDER = "local-server"
"""The server's folder, in that of the run that started it."""

FOLDER = "checkpoints"
"""The checkpoints' folder, in the server's."""

TAIL_LINES = 30
"""Lines of the server's log in an error."""


class LocalServerError(Exception):
    """The local server did not start, or has stopped by itself.

    Attributes:
        log: the server's log file, or None if it never wrote one.
        tail: its last lines.
    """

    def __init__(self, message: str, *, log: Path | None = None) -> None:
        self.log = log
        self.tail = _tail(log)
        if self.tail:
            message = f"{message}\n--- the end of {log}:\n{self.tail}"
        super().__init__(message)


class LocalConfigError(LocalServerError, ValueError):
    """Bad input, or something missing here, that is found before anything starts."""


def _tail(log: Path | None) -> str:
    if log is None or not log.is_file():
        return ""
    with open(log, "rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - 16_384))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-TAIL_LINES:])


def default_compile_cache() -> Path:
    """The user's cache folder for compiled programs, shared by all local servers."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "inspect-tinker-plugin" / "jax"


@dataclass(frozen=True)
class LocalSettings:
    """Sizes and limits of a local server. The defaults suit the tiny model on two cores."""

    port: int = 0
    """Port on 127.0.0.1; 0 takes a free one."""
    adapters: int = 16
    """LoRA slots: one is the base model, each training client and each set of sampler
    weights in use holds one. The least recently used sampler weights are unloaded first."""
    max_lora_rank: int = 32
    """The highest LoRA rank that a client may ask for."""
    sample_batch: int = 32
    """Sequences sampled together. Batches are padded to it, so that nothing is compiled again
    from step to step: near the number of rollouts in a batch is best."""
    train_batch: int = 32
    """Sequences in one forward-backward pass; longer batches are cut into passes."""
    start_timeout: float = 300.0
    """Seconds until the model must have been loaded."""
    stop_timeout: float = 8.0
    """Seconds given to an orderly shutdown before the processes are killed."""
    session_timeout: int = 300
    """Seconds without a heartbeat until a client's models are unloaded."""
    compile_cache: str | None = None
    """Folder for compiled programs, None for the user's cache folder. The first training step
    takes about half a minute without it, and a few seconds with it."""

    def __post_init__(self) -> None:
        for name in ("adapters", "max_lora_rank", "sample_batch", "train_batch"):
            if getattr(self, name) < 1:
                raise LocalConfigError(f"local server: {name} must be at least 1")
        if self.adapters < 3:
            raise LocalConfigError(
                "local server: adapters must be at least 3 (the base model, one that is "
                "trained, one that is sampled from)"
            )


def missing() -> str | None:
    """Return why a local server cannot run here, or None. Imports nothing heavy."""
    if sys.platform == "win32":
        return "the local server needs Linux or macOS"
    absent = [
        name
        for name in ("skyrl", "jax", "fastapi", "uvicorn", "tinker")
        if importlib.util.find_spec(name) is None
    ]
    if absent:
        return (
            f"the local server needs packages that are not installed ({', '.join(absent)}); "
            f"install the extra: {INSTALL}"
        )
    return None


def check_installation() -> None:
    """Raise unless a local server can run here.

    Raises:
        LocalConfigError: a package or the platform is missing; the message says what to install.
        LocalConfigError: SkyRL is there in a release that was not tested.
    """
    if reason := missing():
        raise LocalConfigError(reason)
    installed = importlib.metadata.version("skyrl")
    if installed != SUPPORTED_SKYRL:
        raise LocalConfigError(
            f"the local server was written for skyrl {SUPPORTED_SKYRL}, and {installed} is "
            f"installed; install the tested set: {INSTALL}"
        )


def server_environ(settings: LocalSettings) -> dict[str, str]:
    """Return the environment of the server's processes: this one's, with additions."""
    environ = dict(os.environ)
    # Settings of another SkyRL installation, which would override those given here.
    environ.pop("SKYRL_DATABASE_URL", None)
    cache = Path(settings.compile_cache or default_compile_cache()).expanduser()
    environ |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "200",
    }
    package = Path(__file__).resolve().parents[1]
    if str(package) not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        environ["PYTHONPATH"] = os.pathsep.join(
            [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
    return environ


def checkpoint_file(checkpoints: Path, model_id: str, name: str, *, sampler: bool) -> Path:
    """Return where a checkpoint is: a file with weights to sample from, or a folder."""
    return checkpoints / model_id / ("sampler_weights" if sampler else "") / f"{name}.tar.gz"


def is_training_checkpoint(path: Path) -> bool:
    """Whether a folder holds what a training goes on from."""
    return path.is_dir() and any(path.glob("checkpoint_*"))
