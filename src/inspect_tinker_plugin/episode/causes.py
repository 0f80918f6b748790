"""Whose fault an exception is that ended an episode: told by its type and by where it was raised.

Text of messages is never looked at. docs/design/episodes.md has the rules.
"""

from __future__ import annotations

import asyncio
import errno
import traceback
from collections.abc import Container, Iterator
from types import TracebackType

from inspect_ai.tool import ToolCall
from inspect_ai.util import LimitExceededError, OutputLimitExceededError

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.episode.model import (
    PolicyGradingError,
    PolicyModel,
    RequestRefusedError,
)
from inspect_tinker_plugin.errors import Cause, EpisodeError, SandboxError, SandboxMisusedError
from inspect_tinker_plugin.inspect_internals import SandboxTimeoutError

_TOOL_DISPATCH = frozenset(
    {"inspect_ai.model._call_tools", "inspect_ai.agent._bridge.sandbox.host_tool"}
)
_ANSWERED_INSIDE = frozenset(
    {
        "inspect_ai._util._json_rpc",
        "inspect_ai.tool._mcp._sandbox",
        "inspect_ai.util._sandbox._json_rpc_transport",
    }
)
"""Where Inspect calls a program that it has put into a sandbox, and that a policy can replace."""

_SET_UP_INSIDE = (
    "inspect_ai.tool._sandbox_tools_utils.",
    "inspect_ai.tool._tools._bash_session",
    "inspect_ai.tool._tools._computer.",
    "inspect_ai.tool._tools._skill.install",
    "inspect_ai.tool._tools._web_browser.",
)
"""Where its tools put programs and files into a sandbox, or need those of the image. That fails for
a policy that was there first, and for an image that does not suit the tool."""

_MCP = "inspect_ai.tool._mcp._local"
"""Where it calls MCP servers, of which some are in a sandbox and others are not."""

_MCP_IN_SANDBOX = "create_server_sandbox."
"""How the qualified name begins of what connects to a server in a sandbox."""

_PROVIDERS = "inspect_ai.model._providers"
_MODEL = "inspect_ai.model._model"

_PROVOKED = (OSError, UnicodeError, OutputLimitExceededError, asyncio.CancelledError)
"""Exceptions that a sandbox raises about files and commands, which the policy can provoke (the last
one when a time-out of the task ends a command, and is what an exception is raised about). The
sandbox's own failures have other types, except for a lost connection and ``_REFUSED``."""

_REFUSED = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})
"""What this machine answers a provider that wants to start its client or to open a file. From the
pool, the same numbers tell what the kernel has said inside a container."""

_POOL = "inspect_tinker_plugin.docker_pool"
_CLIENT = "docker"
"""The program that Inspect's own provider starts for each operation."""

_WATCHED = "inspect_tinker_plugin.episode.operations"
"""Where the operations of sandboxes are waited for."""

_OPERATIONS = frozenset({"exec", "read_file", "write_file", "connection"})
"""Methods of a sandbox environment."""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that it was raised from, each once."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (
            None if current.__suppress_context__ else current.__context__
        )


def _modules(tb: TracebackType | None) -> list[str]:
    """Modules of a traceback's frames, outermost first."""
    return [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(tb)]


def attribute(
    error: BaseException,
    *,
    phase: Cause,
    sandbox_modules: frozenset[str] = frozenset(),
    policy_spoke: bool = True,
    worked: Container[str] = (),
) -> Cause:
    """Decide the cause of an exception that ended an episode.

    Args:
        error: The exception, with its traceback.
        phase: What was running: ``SANDBOX`` (start-up), ``SOLVER`` or ``SCORER``.
        sandbox_modules: Modules that define the sandbox environments in use.
        policy_spoke: Whether the policy has given a reply; before that it can provoke nothing.
        worked: Tools of Inspect that have given a result in the task's sandboxes: its image suits
            them, so that what they miss there is what a policy has taken away.

    Returns:
        The most specific cause: a sandbox that fails under a scorer is the sandbox's fault,
        a judge that fails under a scorer is the judge's. Errors that commands inside a sandbox
        can provoke are never the sandbox's own: a policy could void its bad episodes with them.
        Those before its first reply are the task's, whose file was missing or command too slow.
    """
    cause = _found(error, phase, sandbox_modules, worked)
    if cause is not Cause.INSIDE_SANDBOX or policy_spoke:
        return cause
    died = any(isinstance(link, SandboxMisusedError) for link in _chain(error))
    return Cause.SANDBOX if died else phase


def _found(
    error: BaseException, phase: Cause, sandbox_modules: frozenset[str], worked: Container[str]
) -> Cause:
    if phase is Cause.SANDBOX:
        return phase
    links = list(_chain(error))
    for link in links:
        if isinstance(link, PolicyGradingError):
            return Cause.JUDGE
        if isinstance(link, RequestRefusedError):
            return Cause.POLICY
    # What was raised about an earlier exception, and says nothing itself, has that one's cause.
    for position, link in enumerate(links):
        cause = _of_type(link) or _of_place(link, sandbox_modules, worked)
        if cause is Cause.INSIDE_SANDBOX and Cause.SANDBOX in map(_of_type, links[position:]):
            return Cause.SANDBOX
        if cause is not None:
            return cause
    modules = _modules(error.__traceback__)
    if phase is Cause.SOLVER and modules and modules[-1] not in _TOOL_DISPATCH:
        return Cause.TOOL if _TOOL_DISPATCH.intersection(modules) else phase
    return phase


def _of_type(error: BaseException) -> Cause | None:
    """Return the cause that an exception's type tells."""
    if isinstance(error, SandboxMisusedError | SandboxTimeoutError):
        return Cause.INSIDE_SANDBOX
    return Cause.SANDBOX if isinstance(error, SandboxError) else None


def _of_place(
    error: BaseException, sandbox_modules: frozenset[str], worked: Container[str]
) -> Cause | None:
    """Return the cause that the place tells where an exception was raised."""
    tb = error.__traceback__
    modules = _modules(tb)
    ended = isinstance(error, asyncio.CancelledError) and _WATCHED in modules
    if ended or sandbox_modules.intersection(modules):
        provoked = isinstance(error, _PROVOKED) and not isinstance(error, ConnectionError)
        here = isinstance(error, OSError) and _is_of_this_machine(error, modules)
        return Cause.INSIDE_SANDBOX if provoked and not here else Cause.SANDBOX
    if _answered_inside(tb, modules) or (
        any(module.startswith(_SET_UP_INSIDE) for module in modules) and _called_tool(tb) in worked
    ):
        return Cause.INSIDE_SANDBOX
    return Cause.JUDGE if _raised_by_another_model(tb, modules) else None


def _is_of_this_machine(error: OSError, modules: list[str]) -> bool:
    """Whether a sandbox's error is about this machine, not about what is inside."""
    if modules[-1].startswith(_POOL):
        return False
    no_client = error.filename == _CLIENT and "subprocess" in modules
    return error.errno in _REFUSED or no_client


def _answered_inside(tb: TracebackType | None, modules: list[str]) -> bool:
    """Whether an exception is about the answer of Inspect's own programs in a sandbox."""
    if _MCP not in modules:
        return not _ANSWERED_INSIDE.isdisjoint(modules)
    servers = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(tb))
    connect = (getattr(server, "_client", None) for server in servers)
    return any(getattr(each, "__qualname__", "").startswith(_MCP_IN_SANDBOX) for each in connect)


def _called_tool(tb: TracebackType | None) -> str:
    """Name the tool whose call raised an exception, as the model calls it."""
    for frame, _ in reversed(list(traceback.walk_tb(tb))):
        call = frame.f_locals.get("call")
        if isinstance(call, ToolCall):
            return call.function
    return ""


def _raised_by_another_model(tb: TracebackType | None, modules: list[str]) -> bool:
    if not any(module == _MODEL or module.startswith(_PROVIDERS) for module in modules):
        return False
    callers = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(tb))
    # Inspect looks at a call's tools and options before the policy hears of it.
    return "inspect_tinker_plugin.episode.model" not in modules and not any(
        isinstance(caller, PolicyModel) for caller in callers
    )


def _sandbox_operation(error: BaseException, sandbox_modules: frozenset[str]) -> str | None:
    """Name the operation of a sandbox environment that raised an exception."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name in _OPERATIONS and (
            str(frame.f_globals.get("__name__", "")) in sandbox_modules
        ):
            return frame.f_code.co_name
    return None


def episode_error(
    error: BaseException,
    *,
    cause: Cause,
    task: str,
    sample_id: int | str | None,
    epoch: int,
    sandbox_modules: frozenset[str] = frozenset(),
) -> EpisodeError:
    """Wrap an exception with its cause, task and sample; the original is its ``__cause__``."""
    text = internals.text_of(error)
    if isinstance(error, LimitExceededError):
        text = f"{error.message} while scoring"
    operation = _sandbox_operation(error, sandbox_modules)
    if operation is not None:
        text = f"{text} (in {operation}() of the sandbox)"
    wrapped = EpisodeError(
        f"{type(error).__name__}: {text}",
        cause=cause,
        task=task,
        sample_id=sample_id,
        epoch=epoch,
    )
    wrapped.__cause__ = error
    return wrapped
