"""A container's channel is used from several threads, each with its own event loop."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any, SupportsIndex

import pytest

from inspect_docker_pool.command import AttachedSocket, Call, Capture
from inspect_docker_pool.executor import Executor


@pytest.fixture
def executor() -> Iterator[Executor]:
    ours, theirs = socket.socketpair()
    with theirs:
        made = Executor(AttachedSocket(ours))
        yield made
        made.close()


def test_input_is_counted_before_another_thread_sends_more(executor: Executor) -> None:
    could_send: list[bool] = []

    def try_to_send() -> None:
        could_send.append(executor._sending.acquire(blocking=False))
        if could_send[-1]:
            executor._sending.release()

    class Input(bytearray):
        def __delitem__(self, piece: SupportsIndex | slice) -> None:
            thread = threading.Thread(target=try_to_send)
            thread.start()
            thread.join()
            super().__delitem__(piece)

    call = Call(1, Capture(0), Capture(0), rest=Input(b"x" * 1000), credit=400)
    executor.feed(call)
    executor.feed(call, 500)
    assert (len(call.rest), call.credit) == (100, 0)
    assert could_send == [False, False]


async def test_a_request_may_begin_in_another_loop_while_one_ends(executor: Executor) -> None:
    class Observed(Call):
        def __getattribute__(self, name: str) -> Any:
            if name == "changed":  # another thread goes on between any two steps of this one
                begun = max(executor._calls) + 1
                executor._calls[begun] = Call(begun, Capture(0), Capture(0))
            return super().__getattribute__(name)

    for number in (1, 2):
        executor._calls[number] = Observed(number, Capture(0), Capture(0))
    await asyncio.to_thread(asyncio.run, _wake(executor))
    assert len(executor._calls) == 4


async def _wake(executor: Executor) -> None:
    executor._wake()


def test_output_that_comes_while_some_is_taken_is_kept() -> None:
    class Output(bytearray):
        def __bytes__(self) -> bytes:
            taken = bytearray(self)
            self += b" second"  # by the thread that reads
            return bytes(taken)

    capture = Capture(100, Output(b"first"))
    assert [capture.take(), bytes(bytearray(capture.data))] == [b"first", b" second"]
