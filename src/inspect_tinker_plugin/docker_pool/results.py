"""Turns the end of a request into a result, or the error that Inspect's Docker provider raises."""

from __future__ import annotations

import errno
from dataclasses import replace

from inspect_ai.util import SandboxUnavailableError

from inspect_tinker_plugin.docker_pool.command import Command, CommandResult
from inspect_tinker_plugin.docker_pool.executor import Call, End, Flag, How, Stage
from inspect_tinker_plugin.errors import SandboxMisusedError

_EXHAUSTED = {
    errno.EAGAIN: "no process is left under its limit",
    errno.ENOMEM: "no memory is left",
    errno.EMFILE: "no file descriptor is left",
    errno.ENFILE: "no file descriptor is left",
}
_RUNTIME = "OCI runtime exec failed: exec failed: unable to start container process: "


class SandboxExhaustedError(SandboxMisusedError, SandboxUnavailableError):
    """The container runs, but its commands have left no resources to start another one."""


def result_of(call: Call, command: Command, *, not_found: int) -> CommandResult:
    """Interpret how a command ended.

    Args:
        call: the request, ended.
        command: the command.
        not_found: the engine's own status for a command that does not exist.

    Raises:
        SandboxMisusedError: commands in the container kept this one from running.
        OSError: the command is longer than the kernel takes.
    """
    end = call.end
    assert end is not None
    raise_misuse(end)
    result = CommandResult(
        status=end.exit_status,
        stdout=bytes(call.out.data),
        stderr=bytes(call.err.data),
        timed_out=Flag.TIMED_OUT in end.flags,
        overflowed=Flag.OVERFLOWED in end.flags,
    )
    if end.how is How.ENDED or result.timed_out or result.overflowed:
        return result
    if end.how is How.NOT_STARTED:
        return _not_started(end, command, result, not_found)
    raise lost()


def raise_misuse(end: End) -> None:
    """Raise if commands in the container are to blame, whatever the request was.

    Raises:
        SandboxMisusedError: nothing can be started, or something cannot be stopped.
    """
    if Flag.UNSTOPPED in end.flags:
        raise SandboxMisusedError("a command could not be stopped")
    if end.how is How.NOT_STARTED:
        if end.stage is Stage.RESET:
            raise SandboxMisusedError("the container's limits were lowered from inside")
        if end.error in _EXHAUSTED and end.stage in (Stage.FORK, Stage.EXEC, Stage.OPEN):
            raise SandboxExhaustedError(
                f"the sandbox could not start a command: {_EXHAUSTED[end.error]}"
            )


def lost() -> SandboxMisusedError:
    """Make the error for a request whose process was killed before it could report."""
    return SandboxMisusedError(
        "what watched over a command was killed: the container was out of memory, or a command "
        "ended every process in it"
    )


def _not_started(
    end: End, command: Command, result: CommandResult, not_found: int
) -> CommandResult:
    """Describe a command that could not start in the words of the engine and ``timeout``."""
    name = command.argv[0]

    def runtime(text: str, status: int = 126) -> CommandResult:
        return replace(result, status=status, stdout=f"{text}\r\n".encode(errors="replace"))

    if end.stage is Stage.USER:
        user = (command.user or "").partition(":")[0]
        return runtime(f"unable to find user {user}: no matching entries in passwd file")
    if end.stage is Stage.GROUP:
        group = (command.user or "").partition(":")[2]
        return runtime(f"unable to find group {group}: no matching entries in group file")
    if end.stage is Stage.RANGE:
        return runtime("uids and gids must be in range 0-2147483647")
    if end.stage is Stage.FOLDER:
        reason = f'chdir to cwd ("{command.cwd}") set in config.json failed: {end.reason.lower()}'
        return runtime(f"{_RUNTIME}{reason}: unknown")
    if end.error == errno.E2BIG:
        raise OSError(errno.E2BIG, end.reason, name)
    if command.timeout is not None:
        said = f"/usr/bin/timeout: failed to run command '{name}': {end.reason}\n"
        status = 127 if end.error == errno.ENOENT else 126
        return replace(
            result, status=status, stderr=said.encode(errors="replace"), denied=_denied(end)
        )
    if end.error == errno.ENOEXEC:
        said = f"exec {name}: exec format error\n"
        return replace(result, status=1, stderr=said.encode(errors="replace"))
    if end.error != errno.ENOENT:
        denied = runtime(f'{_RUNTIME}exec: "{name}": {end.reason.lower()}: unknown')
        return replace(denied, denied=_denied(end))
    if "/" in name:
        why = f'exec: "{name}": stat {name}: no such file or directory'
    else:
        why = f'exec: "{name}": executable file not found in $PATH'
    return runtime(f"{_RUNTIME}{why}: unknown", not_found)


def _denied(end: End) -> bool:
    return end.error == errno.EACCES
