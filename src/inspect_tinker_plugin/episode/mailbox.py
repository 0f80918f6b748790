"""Where the two sides of an episode meet: the solver asks, the environment answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from inspect_tinker_plugin.contracts.episodes import EpisodeResult, Outcome, Reply, TurnRequest
from inspect_tinker_plugin.processes.loops import cancel, settle


class PolicyDoneError(RuntimeError):
    """The model under training was asked for output after the solver had ended."""

    def __init__(self) -> None:
        super().__init__(
            "the model under training was asked for output after the solver had ended (by the "
            "task's cleanup, or by work that the solver left behind). Such a reply would be no "
            "part of what was scored, so it is not sampled; name another model there."
        )


_lock = threading.RLock()
"""Guards all mailboxes: they are held for a few lines, and never while anybody waits."""

_PAUSE = 0.01
"""Seconds before a call that nobody answers is cancelled: a solver may repeat it for ever."""


@dataclass(frozen=True, slots=True)
class _Parked:
    request: TurnRequest | None
    """``None``: it waits for its turn only."""
    answer: asyncio.Future[Any]


class Mailbox:
    """Serves the model calls of one episode, one at a time, first in first out.

    A solver may ask from several coroutines at once, and from threads with an event loop of their
    own; only the oldest call is shown to the environment, which may wait in yet another loop. Each
    waiter is woken in its own loop. A call that was cancelled while it waited is skipped.
    """

    def __init__(self) -> None:
        self._waiting: list[_Parked] = []
        self._shown: _Parked | None = None
        self._outcome: EpisodeResult | BaseException | None = None
        self._open = True
        self._abandoned = False
        self._watchers: list[asyncio.Future[None]] = []

    # the solver's side

    async def ask(self, request: TurnRequest) -> Reply:
        """Park a model call until the environment answers it.

        Raises:
            PolicyDoneError: The solver has ended.
            CancelledError: Nobody answers any more.
        """
        return cast(Reply, await (await self._park(request)))

    async def turn(self) -> None:
        """Wait until the calls that were parked before have got their answers.

        Raises:
            PolicyDoneError, CancelledError: As for :meth:`ask`.
        """
        await (await self._park(None))

    async def _park(self, request: TurnRequest | None) -> asyncio.Future[Any]:
        parked = _Parked(request, asyncio.get_running_loop().create_future())
        with _lock:
            if not self._open:
                raise PolicyDoneError
            if not self._abandoned:
                self._waiting.append(parked)
                self._notify()
                return parked.answer
        await asyncio.sleep(_PAUSE)
        raise asyncio.CancelledError("the episode was stopped")

    def close(self) -> None:
        """Accept no more model calls, because the solver has ended; parked calls are refused."""
        with _lock:
            self._open = False
            refused = self._list_parked()
            self._waiting.clear()
            self._shown = None
        for parked in refused:
            settle(parked.answer, error=PolicyDoneError())

    def abandon(self) -> None:
        """Cancel whoever waits for an answer, and whoever asks from now on: nobody answers.

        A cancelled solver may ask once more in a shield, for a summary say, which no cancellation
        of the episode reaches. Neither does it reach a thread that asks in a loop of its own.
        """
        with _lock:
            self._abandoned = True
            left = self._list_parked()
        for parked in left:
            cancel(parked.answer)

    def _list_parked(self) -> list[_Parked]:
        return [*self._waiting, *([] if self._shown is None else [self._shown])]

    def finish(self, outcome: EpisodeResult | BaseException) -> None:
        """Hand over how the episode ended, or why it has no result; only the first call counts."""
        with _lock:
            if self._outcome is None:
                self._outcome = outcome
                self._notify()

    # the environment's side

    def answer(self, reply: Reply) -> bool:
        """Answer the call that was shown last; return whether somebody still waits for it."""
        with _lock:
            shown, self._shown = self._shown, None
        return shown is not None and settle(shown.answer, reply)

    async def next(self) -> Outcome:
        """Wait for the next model call, or for the end of the episode.

        Raises:
            EpisodeClosedError: The episode was closed.
        """
        return await self._wait_for(self._show)

    async def end(self) -> EpisodeResult:
        """Wait for the end of the episode, past model calls that nobody will answer.

        Raises:
            EpisodeClosedError: The episode was closed.
        """
        return cast(EpisodeResult, await self._wait_for(lambda: None))

    async def _wait_for(self, show: Callable[[], TurnRequest | None]) -> Outcome:
        while True:
            with _lock:
                if isinstance(self._outcome, BaseException):
                    raise self._outcome
                found = show() if self._outcome is None else self._outcome
                if found is not None:
                    return found
                changed = asyncio.get_running_loop().create_future()
                self._watchers.append(changed)
            try:
                await changed
            finally:
                with _lock:
                    if changed in self._watchers:  # cancelled
                        self._watchers.remove(changed)

    def _notify(self) -> None:
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            settle(watcher)

    def _show(self) -> TurnRequest | None:
        while self._waiting:
            parked = self._waiting.pop(0)
            if parked.answer.done() or parked.answer.get_loop().is_closed():
                continue
            if parked.request is None:
                settle(parked.answer)
                continue
            self._shown = parked
            return parked.request
        return None
