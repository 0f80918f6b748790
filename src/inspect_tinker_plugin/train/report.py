"""Writes ``report.html``: one self-contained page about a run."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from urllib.parse import quote

from inspect_tinker_plugin.rl.builder import short_name
from inspect_tinker_plugin.train.charts import Chart, chart_imitation, chart_training, draw_chart
from inspect_tinker_plugin.train.history import (
    WITH_SIGNAL,
    History,
    number,
    read_history,
    run_problems,
)

REPORT = "report.html"
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body><main>{body}</main></body></html>
"""


def write_report(log_dir: Path) -> Path:
    """Write the report of a run atomically; works at any time of a run.

    Raises:
        OSError: It cannot be written.
    """
    path = log_dir / REPORT
    temporary = path.with_suffix(".writing")
    temporary.write_text(render(read_history(log_dir)), encoding="utf-8")
    os.replace(temporary, path)
    return path


def render(history: History) -> str:
    """Return the page."""
    task = ", ".join(short_name(each) for each in history.tasks)
    model = str(history.run.get("model", ""))
    about = [Path(model).name or model, history.run.get("renderer")]
    body = [
        f"<h1>{escape(task)}</h1>",
        f'<p class="sub">{escape(" · ".join(str(part) for part in about if part))}</p>',
        _problems(history),
        _tiles(history),
        '<div class="grid2">',
        *map(_card, [*chart_imitation(history.imitation), *chart_training(history.steps)]),
        "</div>",
        _step_table(history),
        _test_table(history),
        _evaluations(history),
        _configuration(history),
    ]
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    return _PAGE.format(title=escape(f"{task}: training"), style=style, body="\n".join(body))


def _problems(history: History) -> str:
    problems = run_problems(
        [step.figures for step in history.steps],
        [one for step in history.steps for one in step.graded],
        history.config.get("max_tokens"),
    )
    return "".join(f'<p class="problem">{escape(problem)}</p>' for problem in problems)


# figures at the top


def _tiles(history: History) -> str:
    rewards = [step.reward for step in history.steps if step.reward is not None]
    tests = [step.test_reward for step in history.steps if step.test_reward is not None]
    rollouts = [one for step in history.steps for one in step.rollouts]
    seconds = sum(number(step.figures, "time/total") or 0.0 for step in history.steps)
    tiles = [(str(len(rewards)), "steps", "")]
    if rewards:
        quarter = max(1, len(rewards) // 4)
        first, last = fmean(rewards[:quarter]), fmean(rewards[-quarter:])
        tiles.append(
            (f"{first:.3f} → {last:.3f}", "reward, first and last quarter", _way(first, last))
        )
    if tests:
        text = f"{tests[0]:.3f} → {tests[-1]:.3f}" if len(tests) > 1 else f"{tests[0]:.3f}"
        tiles.append((text, "test reward, first and last", _way(tests[0], tests[-1])))
    shares = [v for s in history.steps if (v := number(s.figures, WITH_SIGNAL)) is not None]
    if shares:
        tiles.append(
            (f"{fmean(shares):.0%}", "groups with a signal", "" if any(shares) else "down")
        )
    tiles += [
        (str(sum(one.graded for one in rollouts)), "rollouts trained on", ""),
        (str(sum(one.cause is not None for one in rollouts)), "failed rollouts", ""),
        (_duration(seconds), "in training steps", ""),
    ]
    cells = (
        f'<div class="tile"><b class="{kind}">{escape(value)}</b><span>{escape(name)}</span></div>'
        for value, name, kind in tiles
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _way(first: float, last: float) -> str:
    return "up" if last > first else "down" if last < first else ""


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _card(chart: Chart) -> str:
    return (
        f'<section class="card"><h2>{escape(chart.title)}</h2>'
        f'<p class="note">{escape(chart.note)}</p>{draw_chart(chart)}</section>'
    )


# tables


def _step_table(history: History) -> str:
    rows = []
    for step in history.steps:
        rollouts = step.rollouts
        rows.append(
            [
                str(step.number),
                _shown(step.reward),
                _shown(step.test_reward),
                str(sum(one.graded for one in rollouts)),
                str(sum(one.cause is not None for one in rollouts)),
                _shown(number(step.figures, "time/total"), digits=1),
                "<br>".join(_link(log.path) for log in step.logs),
            ]
        )
    heads = ["step", "reward", "test", "rollouts", "failed", "seconds", "log"]
    note = "Open the logs with <code>inspect view --log-dir rollouts</code> in this folder."
    return _table("Steps", note, heads, rows)


def _test_table(history: History) -> str:
    rows = [
        [
            str(position),
            escape(log.task),
            _shown(fmean(log.rewards()) if log.rewards() else None),
            str(len(log.rollouts)),
            str(sum(one.cause is not None for one in log.rollouts)),
            _link(log.path),
        ]
        for position, log in enumerate(history.tests, start=1)
    ]
    heads = ["evaluation", "task", "reward", "rollouts", "failed", "log"]
    return _table("Evaluations on the test set", "In the order in which they ran.", heads, rows)


def _evaluations(history: History) -> str:
    rows = [[escape(log.task), _link(log.path)] for log in history.evaluations]
    note = "Logs of <code>evaluator_builders</code>, in the order in which they ran."
    return _table("Further evaluations", note, ["task", "log"], rows)


def _table(title: str, note: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<section class="card tables"><h2>{escape(title)}</h2><p class="note">{note}</p>'
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></section>"
    )


def _shown(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _link(path: Path) -> str:
    return f'<a href="{quote(path.as_posix())}">{escape(path.name)}</a>'


def _configuration(history: History) -> str:
    text = escape(json.dumps(history.config, indent=2, default=str))
    return f'<details class="card"><summary>Configuration</summary><pre>{text}</pre></details>'
