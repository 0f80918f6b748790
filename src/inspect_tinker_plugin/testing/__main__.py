"""Prints the parity table of a corpus: `python -m inspect_tinker_plugin.testing CORPUS`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from inspect_tinker_plugin.testing.cases import load_corpus
from inspect_tinker_plugin.testing.table import SIDES, check_corpus


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases of a folder: 0 when all agree, 1 when some do not, 2 when there are none."""
    parser = argparse.ArgumentParser(prog="inspect_tinker_plugin.testing")
    parser.add_argument("corpus", help="folder of modules that register cases")
    parser.add_argument("-k", dest="match", default="", help="only cases with this in theme or id")
    parser.add_argument("--no-docker", action="store_true", help="leave out Docker cases")
    parser.add_argument("--side", choices=SIDES, help="play episodes in one way only")
    args = parser.parse_args(argv)
    cases = [
        each
        for each in load_corpus(args.corpus)
        if args.match in f"{each.theme} {each.id}"
        and not (args.no_docker and each.docker)
        and not (args.side == "tokens" and each.tokens)
    ]
    if not cases:
        print(f"no case matches {args.match!r}", file=sys.stderr)
        return 2
    sides = [args.side] if args.side else SIDES
    return 0 if asyncio.run(check_corpus(cases, sides=sides)) else 1


if __name__ == "__main__":
    sys.exit(main())
