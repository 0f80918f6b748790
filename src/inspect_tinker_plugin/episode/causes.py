"""Whose fault an exception is that ended an episode: told by its type and by where it was raised.

Text of messages is never looked at. docs/design/episodes.md has the rules.
"""

from __future__ import annotations

import asyncio
import errno
import traceback
from collections.abc import Callable, Container, Iterator, Sequence
from types import TracebackType

from inspect_ai.tool import ToolCall
from inspect_ai.util import LimitExceededError, OutputLimitExceededError

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.errors import (
    Cause,
    EpisodeError,
)
from inspect_tinker_plugin.episode.cancellation import modules_of
from inspect_tinker_plugin.episode.model import (
    PolicyGradingError,
    PolicyModel,
    RequestRefusedError,
)
from inspect_tinker_plugin.episode.operations import is_blameless
from inspect_tinker_plugin.inspect_internals import SandboxTimeoutError

_TOOL_DISPATCH = frozenset(
    {
        "inspect_ai.agent._bridge.sandbox.host_tool",
        "inspect_ai.model._call_tools",
        internals.host_tool_called.__module__,
    }
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

_AGENT_PROGRAMS = "inspect_swe."
"""Where agents' programs are run in a sandbox. They fail for a policy that kills them or says what
they cannot go on from, and where they are at fault themselves."""

_FETCHES = (".agentbinary", ".agentwheel", ".download")
"""How the names of the modules end that fetch the programs to this machine."""

AGENT_PROGRAM = "the agent's program"
"""Among what has worked: a solver of the task has come to its end in a sandbox."""

_MCP = "inspect_ai.tool._mcp._local"
"""Where it calls MCP servers, of which some are in a sandbox and others are not."""

_MCP_IN_SANDBOX = "create_server_sandbox."
"""How the qualified name begins of what connects to a server in a sandbox."""

_PROVIDERS = "inspect_ai.model._providers"
_MODEL = "inspect_ai.model._model"

_PROVOKED = (UnicodeError, OutputLimitExceededError, asyncio.CancelledError)
"""Exceptions that a sandbox raises about files and commands, which the policy can provoke (the last
one when a time-out of the task ends a command, and is what an exception is raised about), beside
an ``OSError`` that is not about a connection. The sandbox's own failures have other types."""

_ABOUT_FILES = (
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    TimeoutError,
)
"""Kinds of ``OSError`` that are about what is inside, also where a provider has its own of them."""

_NETWORK = frozenset(
    {
        errno.EADDRINUSE,
        errno.EADDRNOTAVAIL,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.ENOTCONN,
        errno.ETIMEDOUT,
    }
)
"""What the way to a provider answers."""

_REFUSED = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})
"""What this machine answers a provider that wants to start its client or to open a file. From the
pool, the same numbers tell what the kernel has said inside a container."""

_POOL = "inspect_docker_pool"
_CLIENT = "docker"
"""The program that Inspect's own provider starts for each operation."""

_WATCHED = "inspect_tinker_plugin.episode.operations"
"""Where the operations of sandboxes are waited for."""

_OPERATIONS = frozenset({"exec", "read_file", "write_file", "connection"})
"""Methods of a sandbox environment."""


_TOLD_BY = "_inspect_rl_episode"
"""Attribute of an exception: the episode that failed with it first."""


def reported(error: Exception) -> Exception:
    """Return the exception that is reported of a group: the first one in it."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that it was raised about, each once.

    ``raise … from …`` hides what else it was raised about from readers, not from here. Left out are
    cancellations by a group, of whatever ran beside a member that failed: slow or not.
    """
    seen: set[int] = set()
    left: list[tuple[BaseException | None, bool]] = [(error, False)]
    while left:
        current, of_group = left.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        of_group = of_group and isinstance(current, asyncio.CancelledError)
        if not of_group:
            yield current
        # A member is cancelled again and again until it ends, each time about the time before.
        of_group = of_group or isinstance(current, BaseExceptionGroup)
        try:
            left += [(current.__context__, of_group), (current.__cause__, of_group)]
        except Exception:  # properties of its class
            continue


_IN_TURN = (Cause.POLICY, Cause.SANDBOX, Cause.JUDGE, Cause.INSIDE_SANDBOX)
"""Which cause counts, of those that an exception tells and what it was raised about. A failure of
the sandbox or the judge counts more than what the policy can provoke, whichever came first."""

_TOGETHER = (Cause.POLICY, Cause.SANDBOX, Cause.JUDGE, None, Cause.INSIDE_SANDBOX)
"""The same for the members of a group: one that tells nothing is the fault of what was running."""


def attribute(
    error: BaseException,
    *,
    phase: Cause,
    sandbox_modules: frozenset[str] = frozenset(),
    policy_spoke: bool = True,
    worked: Container[str] = (),
    episode: int = 0,
) -> Cause:
    """Decide the cause of an exception that ended an episode.

    Args:
        error: The exception, with its traceback.
        phase: What was running: ``SANDBOX`` (start-up), ``SOLVER`` or ``SCORER``.
        sandbox_modules: Modules that define the sandbox environments in use.
        policy_spoke: Whether the policy has given a reply; before that it can provoke nothing.
        worked: Tools of Inspect that have given a result in the task's sandboxes: its image suits
            them, so that what they miss there is what a policy has taken away. Also
            ``AGENT_PROGRAM``.
        episode: Number of the episode. What an earlier one failed with already (an exception that
            several await, or that is raised again and again) blames no policy.

    Returns:
        The most specific cause: a sandbox that fails under a scorer is the sandbox's fault,
        a judge that fails under a scorer is the judge's. Errors that commands inside a sandbox
        can provoke are never the sandbox's own: a policy could void its bad episodes with them.
        Those before its first reply are the task's, whose file was missing or command too slow.
    """
    if phase is Cause.SANDBOX:
        return phase
    died = False

    def told_by(link: BaseException) -> Cause | None:
        nonlocal died
        told = _of_type(link) or _of_place(link, sandbox_modules, worked)
        if told is not Cause.INSIDE_SANDBOX:
            return told
        died = died or getattr(link, "inside_sandbox", False)
        return told if _first_told(link, episode) == episode else None

    cause = _evidence(error, told_by, {})
    if cause is Cause.INSIDE_SANDBOX and not policy_spoke:
        cause = Cause.SANDBOX if died else None
    return cause or _of_what_ran(error, phase)


def _evidence(
    error: BaseException,
    told_by: Callable[[BaseException], Cause | None],
    known: dict[int, Cause | None],
) -> Cause | None:
    """Return the cause that an exception tells, or its members, or what it was raised about."""
    found: list[Cause | None] = []
    for link in _chain(error):
        if id(link) not in known:
            known[id(link)] = None  # for a member that was raised about its own group
            told = told_by(link)
            if told is None and isinstance(link, BaseExceptionGroup):
                told = _first_of(
                    _TOGETHER, [_evidence(each, told_by, known) for each in link.exceptions]
                )
            known[id(link)] = told
        found.append(known[id(link)])
    return _first_of(_IN_TURN, found)


def _first_of(order: Sequence[Cause | None], found: Sequence[Cause | None]) -> Cause | None:
    return next((cause for cause in order if cause in found), None)


def _first_told(error: BaseException, episode: int) -> int:
    """Return the episode that failed with an exception first: this one, unless there was one."""
    first: int = vars(error).setdefault(_TOLD_BY, episode)
    return first


def has_timed_out(error: BaseException) -> bool:
    """Whether an exception is or was raised about a time-out of the code that was running.

    The time-out of a group's member is what ends those beside it, and not the other way round.
    """
    links = list(_chain(error))
    return any(isinstance(link, TimeoutError) for link in links) and not any(
        isinstance(link, BaseExceptionGroup) for link in links
    )


def _of_what_ran(error: BaseException, phase: Cause) -> Cause:
    """Return the cause of an exception that tells nothing: what was running."""
    raised = reported(error) if isinstance(error, Exception) else error
    modules = modules_of(raised.__traceback__)
    if phase is Cause.SOLVER and modules and modules[-1] not in _TOOL_DISPATCH:
        return Cause.TOOL if _TOOL_DISPATCH.intersection(modules) else phase
    return phase


def _of_type(error: BaseException) -> Cause | None:
    """Return the cause that an exception's type tells."""
    if isinstance(error, PolicyGradingError):
        return Cause.JUDGE
    if isinstance(error, RequestRefusedError):
        return Cause.POLICY
    inside: bool | None = getattr(error, "inside_sandbox", None)
    if inside or isinstance(error, SandboxTimeoutError):
        return Cause.INSIDE_SANDBOX
    return None if inside is None else Cause.SANDBOX


def _of_place(
    error: BaseException, sandbox_modules: frozenset[str], worked: Container[str]
) -> Cause | None:
    """Return the cause that the place tells where an exception was raised."""
    tb = error.__traceback__
    modules = modules_of(tb)
    ended = isinstance(error, asyncio.CancelledError) and _WATCHED in modules
    if ended and is_blameless(error):
        return None
    if ended or _in_operation(tb, modules, sandbox_modules):
        provoked = _provoked(error, tb, modules)
        return Cause.INSIDE_SANDBOX if provoked else Cause.SANDBOX
    if _answered_inside(tb, modules):
        return Cause.INSIDE_SANDBOX
    if any(module.startswith(_SET_UP_INSIDE) for module in modules):
        if isinstance(error, OSError) and _is_of_this_machine(error, modules):
            return Cause.SANDBOX
        if _called_tool(tb) in worked:
            return Cause.INSIDE_SANDBOX
    if modules and modules[-1].startswith(_AGENT_PROGRAMS) and AGENT_PROGRAM in worked:
        return None if modules[-1].endswith(_FETCHES) else Cause.INSIDE_SANDBOX
    return Cause.JUDGE if _raised_by_another_model(tb, modules) else None


def _in_operation(
    tb: TracebackType | None, modules: list[str], sandbox_modules: frozenset[str]
) -> bool:
    """Whether a sandbox has raised an exception; its module may be that of the task."""
    below = modules[modules.index(_WATCHED) :] if _WATCHED in modules else ()
    return not sandbox_modules.isdisjoint(below) or _operation(tb, sandbox_modules) is not None


def _provoked(error: BaseException, tb: TracebackType | None, modules: list[str]) -> bool:
    """Whether what a sandbox has raised is about what is inside, or what it was asked for."""
    if isinstance(error, OSError):
        # Those of other libraries are about the way to the provider.
        file = isinstance(error, _ABOUT_FILES) or type(error).__module__ == "builtins"
        away = isinstance(error, ConnectionError) or error.errno in _NETWORK
        return file and not away and not _is_of_this_machine(error, modules)
    # No system takes a name with a NUL byte.
    return isinstance(error, _PROVOKED) or (type(error) is ValueError and _asked_for_nul(tb))


def _asked_for_nul(tb: TracebackType | None) -> bool:
    for frame, _ in traceback.walk_tb(tb):
        if frame.f_globals.get("__name__") == _WATCHED and "args" in frame.f_locals:
            args, kwargs = frame.f_locals["args"], frame.f_locals["kwargs"]
            named = [value for name, value in kwargs.items() if name not in ("input", "contents")]
            return "\\x00" in repr((args[:1], named))
    return False


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
        for_program = internals.host_tool_called(frame)
        if for_program is not None:
            return for_program
    return ""


def _raised_by_another_model(tb: TracebackType | None, modules: list[str]) -> bool:
    if not any(module == _MODEL or module.startswith(_PROVIDERS) for module in modules):
        return False
    callers = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(tb))
    # Inspect looks at a call's tools and options before the policy hears of it.
    return "inspect_tinker_plugin.episode.model" not in modules and not any(
        isinstance(caller, PolicyModel) for caller in callers
    )


def _operation(tb: TracebackType | None, sandbox_modules: frozenset[str]) -> str | None:
    """Name the operation of a sandbox environment that raised an exception."""
    for frame, _ in traceback.walk_tb(tb):
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
    error = reported(error) if isinstance(error, Exception) else error
    text = internals.text_of(error)
    if isinstance(error, LimitExceededError):
        text = f"{error.message} while scoring"
    operation = _operation(error.__traceback__, sandbox_modules)
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
