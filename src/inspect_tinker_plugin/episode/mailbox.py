"""Where the two sides of an episode meet: the solver asks, the environment answers."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from inspect_tinker_plugin.episode.types import EpisodeResult, Outcome, Reply, TurnRequest


@dataclass(frozen=True)
class _Parked:
    request: TurnRequest
    answer: asyncio.Future[Reply]


class Mailbox:
    """Serves the model calls of one episode one at a time, first in first out.

    A solver may ask from several coroutines at once; only the oldest call is shown to the
    environment. A call whose coroutine was cancelled while it waited is skipped.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Parked] = deque()
        self._shown: _Parked | None = None
        self._result: EpisodeResult | None = None
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()

    # the solver's side

    async def ask(self, request: TurnRequest) -> Reply:
        """Park a model call until the environment answers it."""
        parked = _Parked(request, asyncio.get_running_loop().create_future())
        self._waiting.append(parked)
        self._changed.set()
        return await parked.answer

    def finish(self, result: EpisodeResult) -> None:
        """Hand over the result; whatever is still parked will not be shown."""
        self._result = result
        self._changed.set()

    def fail(self, error: BaseException) -> None:
        """Report that the episode ended without a result (cancelled, or a fault of ours)."""
        self._failure = error
        self._changed.set()

    # the environment's side

    def answer(self, reply: Reply) -> None:
        """Answer the call that was shown last; does nothing when it is gone."""
        shown, self._shown = self._shown, None
        if shown is not None and not shown.answer.done():
            shown.answer.set_result(reply)

    async def next(self) -> Outcome:
        """Wait for the next model call, or for the end of the episode.

        Raises:
            EpisodeClosedError: The episode was closed.
        """
        while True:
            if self._result is not None:
                return self._result
            if self._failure is not None:
                raise self._failure
            while self._waiting:
                parked = self._waiting.popleft()
                if not parked.answer.done():
                    self._shown = parked
                    return parked.request
            self._changed.clear()
            await self._changed.wait()
