"""What the start-up file costs a bare interpreter: two empty environments, with and without it.

Prints the median start of both in milliseconds of CPU, their difference (to be at most 1 ms)
and ratio; CPU and not wall clock, which on a busy machine measures the neighbours. Run with
``python benchmarks/startup.py [alternations]`` where the package is installed.
"""

from __future__ import annotations

import os
import statistics
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

START_UP_FILE = "hatch_autorun_inspect_tinker_plugin.pth"
LIMIT_MS = 1.0


def start_ms(python: Path) -> float:
    """CPU of one interpreter that does nothing, in milliseconds."""
    process = os.posix_spawn(python, [str(python), "-c", "pass"], os.environ)
    _, status, used = os.wait4(process, 0)
    assert status == 0
    return (used.ru_utime + used.ru_stime) * 1000


def main() -> int:
    alternations = int(sys.argv[1]) if len(sys.argv) > 1 else 101
    site = Path(sysconfig.get_path("purelib"))
    with tempfile.TemporaryDirectory() as folder:
        pythons = {}
        for name in ("without", "with"):
            venv.create(Path(folder) / name, with_pip=False, symlinks=True)
            pythons[name] = Path(folder) / name / "bin/python"
        (target,) = (Path(folder) / "with").glob("lib/python*/site-packages")
        # The text of the file decides; the package itself is not looked at before Inspect is.
        (target / START_UP_FILE).write_text((site / START_UP_FILE).read_text())
        times: dict[str, list[float]] = {name: [] for name in pythons}
        for turn in range(alternations):
            for name in pythons if turn % 2 else reversed(pythons):
                times[name].append(start_ms(pythons[name]))
    without, with_file = (statistics.median(times[name]) for name in ("without", "with"))
    print(
        f"start-up: without {without:.2f} ms, with {with_file:.2f} ms, "
        f"difference {with_file - without:+.2f} ms (at most {LIMIT_MS:g}), "
        f"ratio {with_file / without:.3f}, median of {alternations} alternations"
    )
    return int(with_file - without > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
