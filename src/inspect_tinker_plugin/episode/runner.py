"""Episodes of a task: started, answered turn by turn, and closed without leaving a trace."""

from __future__ import annotations

import asyncio
import weakref
from contextvars import Context, copy_context
from typing import Literal

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalSample
from inspect_ai.util import SandboxEnvironmentType

from inspect_tinker_plugin.episode.mailbox import Mailbox
from inspect_tinker_plugin.episode.sample_run import SampleRun
from inspect_tinker_plugin.episode.task import PreparedTask, SandboxMapping, SolverLike
from inspect_tinker_plugin.episode.types import (
    EpisodeOptions,
    EpisodeResult,
    Outcome,
    Reply,
)
from inspect_tinker_plugin.errors import EpisodeClosedError

# asyncio itself holds tasks only weakly; a parked episode must not be collected before
# it has released its sandbox.
_running: set[asyncio.Task[None]] = set()


class EpisodeRunner:
    """Makes episodes of one task; what they share is resolved once.

    Args:
        task: The task.
        options: How episodes are run.
        solver: Replaces the task's solver, as ``inspect eval --solver`` does.
        sandbox: Replaces the task's sandbox, as ``inspect eval --sandbox`` does.
            ``False`` runs without any, whatever task and samples ask for.
        sandbox_mapping: Applied to the sandbox that the task or a sample asks for.
        keep_log: Keep each episode's events, for ``EpisodeResult.build_log``.
    """

    def __init__(
        self,
        task: Task,
        *,
        options: EpisodeOptions | None = None,
        solver: SolverLike | None = None,
        sandbox: SandboxEnvironmentType | Literal[False] | None = None,
        sandbox_mapping: SandboxMapping | None = None,
        keep_log: bool = False,
    ) -> None:
        self.prepared = PreparedTask(
            task,
            options=options or EpisodeOptions(),
            solver=solver,
            sandbox=sandbox,
            sandbox_mapping=sandbox_mapping,
        )
        self._keep_log = keep_log

    def episode(self, sample: Sample, *, epoch: int = 1) -> Episode:
        """Make an episode of a sample, which must have an id; nothing runs yet."""
        return Episode(self.prepared, sample, epoch=epoch, keep_log=self._keep_log)


class Episode:
    """One rollout of one sample.

    ``start()`` runs the task's own solver up to its first model call; ``reply()`` answers
    the call and runs on to the next, or to the scored end. Failures are in the result's
    ``error``. ``close()`` ends it at any point; an episode that is simply dropped is
    closed too.
    """

    def __init__(
        self, prepared: PreparedTask, sample: Sample, *, epoch: int, keep_log: bool
    ) -> None:
        self.prepared = prepared
        self.sample = sample
        self.epoch = epoch
        self._keep_log = keep_log
        self._mailbox = Mailbox()
        self._run: SampleRun | None = None
        self._task: asyncio.Task[None] | None = None
        self._context: Context | None = None

    @property
    def started(self) -> bool:
        """Whether ``start()`` was called."""
        return self._task is not None

    async def start(self) -> Outcome:
        """Run to the first model call, or to the end when the solver makes none."""
        if self._task is not None:
            raise RuntimeError("an episode is started once; make another one")
        run = self._run = SampleRun(
            self.prepared,
            self.sample,
            epoch=self.epoch,
            mailbox=self._mailbox,
            keep_log=self._keep_log,
        )
        self._context = copy_context()
        self._task = asyncio.get_running_loop().create_task(
            _drive(run, self._mailbox),
            name=f"episode {self.prepared.name}/{self.sample.id}",
            context=self._context,
        )
        _running.add(self._task)
        self._task.add_done_callback(_running.discard)
        weakref.finalize(self, _cancel, self._task).atexit = False
        return await self._mailbox.next()

    async def reply(self, reply: Reply) -> Outcome:
        """Answer the parked model call; an exception is raised inside the solver.

        Returns:
            The next model call, or the result. When the episode has ended in the
            meantime (a time limit, say), the answer is dropped and the result returned.
        """
        self._mailbox.answer(reply)
        return await self._mailbox.next()

    async def stop(self, reason: str) -> EpisodeResult:
        """End the episode now, as a limit would, and score what is there.

        Whatever runs is cancelled (a tool, a parked model call). Use it for budgets that
        only the trainer knows.

        Args:
            reason: What the log says, e.g. ``"rollout timeout"``.

        Returns:
            The result, with a limit of type ``custom``.

        Raises:
            EpisodeClosedError: The episode was closed, or its solver had not started yet.
        """
        if self._run is None or not self._run.stop(reason):
            await self.close()
        while True:
            outcome = await self._mailbox.next()
            if isinstance(outcome, EpisodeResult):
                return outcome

    def build_log(self) -> EvalSample | None:
        """Build the log of an episode that does not run any more, however it ended.

        Returns:
            The log up to where it got; ``None`` when it was never started or keeps no log.
        """
        if self._run is None or self._context is None or not self._keep_log:
            return None
        return self._context.copy().run(self._run._eval_sample)

    async def close(self) -> None:
        """Cancel what still runs and wait until it has released everything.

        A cancellation of the caller does not stop the release; it goes on in its own task.
        """
        task = self._task
        if task is None or task.done():
            return
        task.cancel()
        await asyncio.shield(asyncio.wait([task]))


async def _drive(run: SampleRun, mailbox: Mailbox) -> None:
    try:
        mailbox.finish(await run.run())
    except asyncio.CancelledError:
        mailbox.fail(EpisodeClosedError("the episode was closed before it ended"))
    except Exception as error:
        mailbox.fail(error)


def _cancel(task: asyncio.Task[None]) -> None:
    """Cancel an episode whose owner is gone; the owner may have lived in another thread."""
    if task.done():
        return
    loop = task.get_loop()
    if not loop.is_closed():
        loop.call_soon_threadsafe(task.cancel)
