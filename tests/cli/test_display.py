"""Tables fit the available width, and numbers and nouns are written as people write them."""

from __future__ import annotations

import pytest
from rich.console import Console

from inspect_tinker_plugin.cli.compare import SideCost, as_text
from inspect_tinker_plugin.cli.reporting import print_to, show_group, table_console
from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.rl.rollouts import RolloutReport


def report(number: int = 1, **fields: object) -> RolloutReport:
    given: dict[str, object] = {
        "task": "t",
        "sample_id": "one",
        "number": number,
        "scores": {"match": {"value": "C"}},
        "metrics": {},
        "reward": 1.0,
        "advantage": -0.001,
        "turns": 1,
        "input_tokens": 12_345,
        "output_tokens": 678,
        "stop": "completed",
        **fields,
    }
    return RolloutReport(**given)  # type: ignore[arg-type]


def printed(reports: list[RolloutReport], width: int) -> list[str]:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(show_group(reports))
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [80, 100])
def test_a_group_fits_and_loses_nothing(width: int) -> None:
    lines = printed([report(1), report(2, reward=0.0)], width)
    assert max(len(line) for line in lines) <= width
    text = " ".join(" ".join(lines).split())
    for shown in ("12,345", "678", "match=C", "completed", "1.00", "2 rollouts"):
        assert shown in text, text
    assert "…" not in text


def test_one_is_not_several_and_zero_has_no_sign() -> None:
    text = "\n".join(printed([report()], 100))
    assert "sample one: 1 rollout" in text
    assert "1 rollouts" not in text
    assert "-0.00" not in text
    assert "+0.00" in text
    assert counted(1, "run") == "1 run"
    assert counted(1_200, "run") == "1,200 runs"


def test_why_a_rollout_failed_is_said_though_no_conversation_is_shown() -> None:
    text = " ".join(printed([report(1), report(2, reward=None, error="[solver] no luck")], 100))
    assert "rollout 2 failed: [solver] no luck" in text


def test_a_pipe_is_as_wide_as_columns_says_and_has_no_trailing_blanks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "77")
    assert table_console().width == 77
    monkeypatch.delenv("COLUMNS")
    assert table_console().width == 100
    print_to(table_console(), show_group([report(1), report(2)]))
    out = capsys.readouterr().out
    assert "match=C" in out
    assert not [line for line in out.splitlines() if line != line.rstrip()]


def test_the_table_of_a_bench_has_sixty_columns() -> None:
    cost = SideCost(side="inspect eval", episodes=1, cpu_s=12.3, wall_s=45.6, turns=3.0)
    text = as_text([cost, cost])
    assert text.startswith("1 episode, 3 turns each")
    assert max(len(line) for line in text.splitlines()) <= 60
