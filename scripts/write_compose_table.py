"""Writes which compose files of ``inspect_evals`` the pool accepts into ``docs/compose-files.md``.

It needs that package's files (``pip install --no-deps inspect-evals``), and ``docker compose``.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.inspect_docker_pool.composed import PAGE, evals_files, table  # noqa: E402

START, END = "<!-- table -->\n", "<!-- end of table -->\n"


def main() -> None:
    files = evals_files()
    if not files:
        sys.exit("inspect_evals is not installed: pip install --no-deps inspect-evals")
    before, rest = PAGE.read_text().split(START)
    PAGE.write_text(before + START + table(files) + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
