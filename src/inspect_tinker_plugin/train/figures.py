"""The charts of a report, drawn from the steps of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from inspect_tinker_plugin.train.charts import Band, Line, empty, line_chart, stacked_chart
from inspect_tinker_plugin.train.history import TIMES, RolloutFigures, Step
from inspect_tinker_plugin.train.metrics import LOSS, REWARD, WITH_SIGNAL, number, of_task, tasks_of

_SCORERS = 8
"""Number of scorers that get their own line, the most frequent first."""


def charts(steps: Sequence[Step]) -> list[tuple[str, str, str]]:
    """Return title, note and drawing of each chart."""
    return [
        (
            "Reward",
            "Mean over the rollouts of a step; the areas hold the middle 50% and 80% of them.",
            _reward_chart(steps),
        ),
        ("Scores", "Mean of each scorer.", _score_chart(steps)),
        (
            "Groups with a signal",
            "Share of the groups whose rewards differ; the others teach nothing.",
            _figure_chart(steps, {"groups": WITH_SIGNAL}, unit_share=True),
        ),
        (
            "KL",
            "Between the sampling and the trained policy, per token: two estimates.",
            _figure_chart(
                steps,
                {"v1": "optim/kl_sample_train_v1", "v2": "optim/kl_sample_train_v2"},
            ),
        ),
        (
            "Loss and entropy",
            "As far as the cookbook's loop records them.",
            _figure_chart(steps, {"entropy": "optim/entropy", **_losses(steps)}),
        ),
        ("Length", "Sampled tokens of a rollout: mean, and the middle 80%.", _length_chart(steps)),
        ("Turns", "Model calls of a rollout.", _turn_chart(steps)),
        (
            "Stop reasons",
            "Why rollouts ended, as shares of a step.",
            _counted(steps, lambda one: one.stop if one.graded else None, shares=True),
        ),
        (
            "Errors by cause",
            "Failed rollouts per step, including those that were tried again.",
            _counted(steps, lambda one: one.cause),
        ),
        (
            "Time of a rollout",
            "Seconds, mean; sampling is the wait for the policy.",
            _time_chart(steps),
        ),
        ("Time of a step", "Seconds of wall clock.", _wall_chart(steps)),
    ]


def task_charts(steps: Sequence[Step]) -> list[tuple[str, str, str]]:
    """Return the charts that compare the tasks of a mixture; none for one task."""
    tasks = sorted({task for step in steps for task in tasks_of(step.figures)})
    if not tasks:
        return []
    return [
        (
            "Reward by task",
            "Mean over the rollouts of a step.",
            _figure_chart(steps, {task: of_task(task, REWARD) for task in tasks}),
        ),
        (
            "Groups with a signal by task",
            "Share of a task's groups whose rewards differ.",
            _figure_chart(
                steps, {task: of_task(task, WITH_SIGNAL) for task in tasks}, unit_share=True
            ),
        ),
    ]


def imitation_chart(steps: Mapping[int, Mapping[str, object]]) -> list[tuple[str, str, str]]:
    """Return the chart of an imitation; none if there was none."""
    points = [(i + 1, loss) for i, row in steps.items() if (loss := number(row, LOSS)) is not None]
    if not points:
        return []
    note = "Before the training: nats per token that was learned, by step."
    return [("Imitation", note, line_chart([Line("loss", points)], from_zero=True))]


def _reward_chart(steps: Sequence[Step]) -> str:
    lines = [Line("training", [(s.number, s.reward) for s in steps if s.reward is not None])]
    tests = [(s.number, s.test_reward) for s in steps if s.test_reward is not None]
    if tests:
        lines.append(Line("test", tests, colour=1, dots=True))
    spread = [(s.number, s.rewards()) for s in steps if s.rewards()]
    bands = [
        Band("", [(i, quantile(v, low), quantile(v, 1 - low)) for i, v in spread])
        for low in (0.1, 0.25)
        if spread
    ]
    return line_chart(lines, bands=bands)


def _score_chart(steps: Sequence[Step]) -> str:
    names = Counter(
        name for step in steps for one in _graded(step) for name in one.scores
    ).most_common()
    lines = []
    for colour, (name, _) in enumerate(names[:_SCORERS]):
        values = [
            (s.number, [one.scores[name] for one in _graded(s) if name in one.scores])
            for s in steps
        ]
        lines.append(Line(name, [(i, mean(v)) for i, v in values if v], colour=colour))
    return line_chart(lines)


def _figure_chart(
    steps: Sequence[Step], names: Mapping[str, str], *, unit_share: bool = False
) -> str:
    """Draw metrics of the cookbook by their labels; absent metrics are left out."""
    lines = []
    for colour, (label, name) in enumerate(names.items()):
        points = [(s.number, v) for s in steps if (v := number(s.figures, name)) is not None]
        if points:
            lines.append(Line(label, points, colour=colour % _SCORERS))
    return line_chart(lines, from_zero=unit_share)


def _losses(steps: Sequence[Step]) -> dict[str, str]:
    names = {name for step in steps for name in step.figures if "loss" in name}
    return {name.rpartition("/")[2]: name for name in sorted(names)}


def _length_chart(steps: Sequence[Step]) -> str:
    values = [(s.number, [o.tokens for o in _graded(s) if o.tokens is not None]) for s in steps]
    known = [(i, v) for i, v in values if v]
    if not known:
        return empty("no figures yet")
    band = Band("", [(i, quantile(v, 0.1), quantile(v, 0.9)) for i, v in known], colour=2)
    return line_chart(
        [Line("tokens", [(i, mean(v)) for i, v in known], colour=2)], bands=[band], from_zero=True
    )


def _turn_chart(steps: Sequence[Step]) -> str:
    values = [(s.number, [o.turns for o in _graded(s) if o.turns is not None]) for s in steps]
    line = Line("turns", [(i, mean(v)) for i, v in values if v], colour=4)
    return line_chart([line] if line.points else [], from_zero=True)


def _counted(
    steps: Sequence[Step],
    label: Callable[[RolloutFigures], str | None],
    *,
    shares: bool = False,
) -> str:
    logged = [step for step in steps if step.logs]
    counts = [
        Counter(found for one in step.rollouts if (found := label(one)) is not None)
        for step in logged
    ]
    names = [name for name, _ in sum(counts, Counter()).most_common()]
    layers = {
        name: [
            100 * count[name] / max(1, count.total()) if shares else float(count[name])
            for count in counts
        ]
        for name in names
    }
    return stacked_chart([step.number for step in logged], layers, unit="%" if shares else "")


def _time_chart(steps: Sequence[Step]) -> str:
    timed = [(step.number, _graded(step)) for step in steps if _graded(step)]
    layers = {
        name: [mean([one.times.get(name, 0.0) for one in rollouts]) for _, rollouts in timed]
        for name in TIMES
    }
    return stacked_chart([index for index, _ in timed], layers, unit=" s")


def _wall_chart(steps: Sequence[Step]) -> str:
    timed = [step for step in steps if number(step.figures, "time/total")]

    def seconds(name: str) -> list[float]:
        return [number(step.figures, f"time/{name}") or 0.0 for step in timed]

    total, rollouts = seconds("total"), seconds("sampling")
    training, test = seconds("train_step"), seconds("run_evaluations_parallel")
    rest = [
        max(0.0, t - sum(parts)) for t, *parts in zip(total, rollouts, training, test, strict=True)
    ]
    layers = {"rollouts": rollouts, "training": training, "test set": test, "other": rest}
    return stacked_chart([step.number for step in timed], layers, unit=" s")


def _graded(step: Step) -> list[RolloutFigures]:
    return [one for one in step.rollouts if one.graded]


def quantile(values: Iterable[float], share: float) -> float:
    """Return a quantile, interpolated."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def mean(values: Sequence[float]) -> float:
    """Return the average."""
    return sum(values) / len(values)
