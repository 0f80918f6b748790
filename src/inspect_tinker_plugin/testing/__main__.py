"""Prints the parity table of a corpus: `python -m inspect_tinker_plugin.testing CORPUS`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence

from inspect_tinker_plugin.testing.cases import ParityCase, load_corpus
from inspect_tinker_plugin.testing.parity import (
    ParityReport,
    Side,
    check_case,
    describe,
    eval_trace,
)


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


SIDES: tuple[Side, ...] = ("messages", "tokens")


async def check_corpus(
    cases: Sequence[ParityCase],
    *,
    sides: Sequence[Side] = SIDES,
    show: Callable[[str], None] = print,
) -> bool:
    """Run all cases, printing the table as it grows.

    Args:
        cases: The cases, those of a theme together.
        sides: How episodes are played; each is compared with one eval of the case.
        show: Prints a line.

    Returns:
        Whether every case agrees on every side that it can be played on.
    """
    width = max(len(each.id) for each in cases)
    theme, agreed = "", 0
    played = dict.fromkeys(sides, 0)
    for each in cases:
        if each.theme != theme:
            theme = each.theme
            show(f"\n{theme:<{width}}    turns  {'  '.join(f'{side:<8}' for side in sides)}")
        reports = await _check(each, sides)
        for side in reports:
            played[side] += 1
        agreed += all(report.agrees for report in reports.values())
        _show_case(each, sides, reports, width, show)
    counts = ", ".join(f"{count} in {side}" for side, count in played.items())
    show(f"\n{len(cases)} cases, {agreed} agree ({counts})")
    return agreed == len(cases)


def _show_case(
    case: ParityCase,
    sides: Sequence[Side],
    reports: dict[Side, ParityReport],
    width: int,
    show: Callable[[str], None],
) -> None:
    first = next(iter(reports.values()))
    turns = "?" if first.eval_side is None else str(len(first.eval_side.requests))
    verdicts = "  ".join(f"{_verdict(reports.get(side)):<8}" for side in sides)
    show(f"  {case.id:<{width}}  {turns:>5}  {verdicts}".rstrip())
    for side, report in reports.items():
        if not report.agrees:
            for line in describe(report)[1:]:
                show(f"    {side}: {line.strip()}")
    if case.tokens and "tokens" in sides and "tokens" not in reports:
        show(f"  {'':<{width}}         (not in tokens: {case.tokens})")


def _verdict(report: ParityReport | None) -> str:
    if report is None:
        return "-"
    if report.faults:
        return "FAULTY"
    return "DIFFERS" if report.differences else "agrees"


async def _check(case: ParityCase, sides: Sequence[Side]) -> dict[Side, ParityReport]:
    """Check one case on each side that it can be played on; an error counts as a fault."""
    chosen = [side for side in sides if side == "messages" or not case.tokens]
    reports: dict[Side, ParityReport] = {}
    try:
        expected = await eval_trace(case)
    except Exception as error:
        return {side: _broken(case, error) for side in chosen}
    for side in chosen:
        try:
            reports[side] = await check_case(case, side=side, expected=expected)
        except Exception as error:
            reports[side] = _broken(case, error)
    return reports


def _broken(case: ParityCase, error: Exception) -> ParityReport:
    return ParityReport(name=case.id, differences=[], faults=[f"{type(error).__name__}: {error}"])


if __name__ == "__main__":
    sys.exit(main())
