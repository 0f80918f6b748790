"""Commands as a user runs them, in processes that fork from one that has imported everything.

A new interpreter imports for seconds. Tests of its start and of its end need one; those of a
command, of its signals and of what it prints do not.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import chdir
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.waiting import wait_until

ROOT = Path(__file__).parents[1]
PRELOADED = "tests.preloaded"


@functools.cache
def forking() -> ForkServerContext:
    """Return the context of processes that fork from the one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    with chdir(ROOT):  # that process finds the module here, and says nothing where it does not
        forkserver.ensure_running()
    return context


class Command:
    """A command of ``inspect rl`` that runs in a separate process.

    Args:
        words: the command and its arguments; or ``-c`` and a program, as of Python.
        cwd: the folder that it runs in.
        ignoring: a signal that it ignores from its start, as under ``nohup``.
        prepare: called in its process first; a function of a module.
        environ: further variables of its environment.
    """

    def __init__(
        self,
        *words: str,
        cwd: Path,
        ignoring: signal.Signals | None = None,
        prepare: Callable[[], object] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._words = words
        self._folder = TemporaryDirectory()
        variables = {**os.environ, **(environ or {})}
        given = (words, cwd, Path(self._folder.name), ignoring, prepare, variables)
        self._process = forking().Process(target=_run, args=given)
        self._process.start()

    def wait_until(self, holds: Callable[[], object]) -> None:
        """Wait until something holds; fail when the command ends before, or it takes too long."""

        def now() -> object:
            return holds() or not self._process.is_alive()

        wait_until(now, seconds=200)
        assert holds(), self.wait()

    def send(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self, seconds: float | None = None) -> subprocess.CompletedProcess[str]:
        """Wait for its end; return its exit code, and what it printed."""
        self._process.join(seconds)
        code = self._process.exitcode
        assert code is not None, "it has not ended"
        out, err = (Path(self._folder.name, name).read_text() for name in ("out", "err"))
        self._folder.cleanup()
        return subprocess.CompletedProcess(self._words, code, out, err)


def _run(
    words: tuple[str, ...],
    cwd: Path,
    printed: Path,
    ignoring: signal.Signals | None,
    prepare: Callable[[], object] | None,
    environ: Mapping[str, str],
) -> None:
    assert PRELOADED in sys.modules
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(printed / name, os.O_WRONLY | os.O_CREAT), descriptor)
    warnings.simplefilter("ignore")
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    if ignoring is not None:
        signal.signal(ignoring, signal.SIG_IGN)
    if prepare is not None:
        prepare()
    if words[0] == "-c":
        exec(words[1], {"__name__": "__main__"})
        return
    sys.argv = ["inspect-rl", *words]
    from inspect_tinker_plugin.cli.main import main

    main()
