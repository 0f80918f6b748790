"""Prints the parity table of a corpus: `python -m inspect_tinker_plugin.testing CORPUS`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from inspect_tinker_plugin.testing.cases import load_corpus
from inspect_tinker_plugin.testing.parity import check_corpus


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m inspect_tinker_plugin.testing CORPUS``: 0 when all cases agree."""
    parser = argparse.ArgumentParser(prog="inspect_tinker_plugin.testing")
    parser.add_argument("corpus", help="folder of modules that register cases")
    parser.add_argument("-k", dest="match", default="", help="only cases with this in theme or id")
    parser.add_argument("--no-docker", action="store_true", help="leave out Docker cases")
    parser.add_argument(
        "--tokens", action="store_true", help="play episodes through renderer and tokens"
    )
    args = parser.parse_args(argv)
    cases = [
        each
        for each in load_corpus(args.corpus)
        if args.match in f"{each.theme} {each.id}"
        and not (args.no_docker and each.docker)
        and not (args.tokens and each.tokens)
    ]
    if not cases:
        print(f"no case matches {args.match!r}", file=sys.stderr)
        return 2
    reports = asyncio.run(check_corpus(cases, side="tokens" if args.tokens else "messages"))
    return 0 if all(report.agrees for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
