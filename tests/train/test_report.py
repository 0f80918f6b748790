"""The report of rollouts that really ran, and of folders that are damaged or empty."""

from __future__ import annotations

import asyncio
import html.parser
import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from inspect_ai import Task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.log import EvalLog, read_eval_log
from inspect_ai.scorer import Score, Target, accuracy
from inspect_ai.solver import Generate, Solver, TaskState, solver
from tests.functions import make_scorer
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.tokenizer_utils import get_tokenizer

from inspect_tinker_plugin.logs import assemble_pending
from inspect_tinker_plugin.rl.dataset import as_rl_dataset
from inspect_tinker_plugin.rl.mixture import as_rl_mixture
from inspect_tinker_plugin.testing import ScriptedPolicy, tokenizer_path
from inspect_tinker_plugin.testing.replies import answer_with
from inspect_tinker_plugin.train import history
from inspect_tinker_plugin.train.history import (
    ROLLOUT_LOGS,
    RUN,
    Step,
    read_history,
    read_logs,
    record_run,
)
from inspect_tinker_plugin.train.report import Chart, draw_chart, write_report


@solver
def fails_once() -> Solver:
    failures = iter([True])

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        if next(failures, False):
            raise RuntimeError("a fault of the solver")
        return await generate(state)

    return solve


@make_scorer(accuracy())
async def by_length(state: TaskState, target: Target) -> Score:
    return Score(value=len(state.output.completion) / 100)


def roll_out(make: Callable[..., Any], tasks: Any, folder: Path, **options: Any) -> None:
    """Roll two batches out, as the cookbook's loop does."""
    renderer = get_renderer("qwen3_instruct", get_tokenizer(str(tokenizer_path())))
    dataset = make(tasks, renderer, log_dir=folder, **options)
    policy: Any = ScriptedPolicy(renderer, answer_with("four"), max_tokens=64)

    async def roll() -> None:
        for batch in range(2):
            for builder in dataset.get_batch(batch):
                await do_group_rollout(builder, policy, strategy=RetryOnFailure(max_retries=2))

    asyncio.run(roll())
    assemble_pending(folder)


def two_samples(name: str, **options: Any) -> Task:
    samples = MemoryDataset([Sample(id=i, input=f"{i}", target="x") for i in range(2)])
    return Task(name=name, dataset=samples, scorer=by_length(), **options)


@pytest.fixture(scope="module")
def rolled_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    task = two_samples("<b>names</b>", solver=fails_once())
    roll_out(as_rl_dataset, task, folder / ROLLOUT_LOGS, group_size=2)
    return folder


@pytest.fixture
def run(rolled_out: Path, tmp_path: Path) -> Path:
    """A folder of two steps: the rollouts are real, the cookbook's figures are written here."""
    shutil.copytree(rolled_out, tmp_path, dirs_exist_ok=True)
    rows = [
        {"step": i, "env/all/reward/total": 0.1 + i, "time/total": 2, "time/sampling": 1}
        for i in (0, 1)
    ]
    rows[1]["test/env/all/reward/total"] = 0.75
    write_metrics(tmp_path, *rows)
    (tmp_path / "run.json").write_text(json.dumps({"task": "<b>names</b>", "model": "m"}))
    return tmp_path


def write_metrics(folder: Path, *rows: Mapping[str, object]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def page_of(folder: Path) -> str:
    return write_report(folder).read_text()


class Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "a":
            self.found.append(values["href"] or "")
        elif tag in ("script", "link", "img", "iframe"):
            self.loaded.append(tag)


def test_the_history_knows_rewards_scores_errors_and_times(run: Path) -> None:
    first, second = (step.figures for step in read_history(run).steps)
    assert (first["rollouts/graded"], first["rollouts/failed"]) == (2, 1)
    assert (first["rollouts/error/solver"], second["rollouts/error/solver"]) == (1, 0)
    assert second["rollouts/score/by_length"] == second["rollouts/reward"]
    assert second["rollouts/reward/p10"] == pytest.approx(second["rollouts/reward"])
    assert (second["rollouts/turns"], second["rollouts/stop/completed"]) == (1, 100)
    assert second["rollouts/tokens"] > 0
    times = {name for name in second if name.startswith("rollouts/time/")}
    assert len(times) == 4
    assert second["test/env/all/reward/total"] == 0.75


def test_a_log_that_is_removed_while_a_folder_is_read_is_no_damaged_one(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read = read_eval_log

    def read_late(path: str, **options: Any) -> EvalLog:
        Path(path).unlink()
        return read(path, **options)

    monkeypatch.setattr(history, "read_eval_log", read_late)
    assert read_logs(run, ROLLOUT_LOGS) == []
    assert not caplog.records


def test_what_a_run_is_can_be_read_while_it_is_continued(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, write, seen = (run / RUN).read_text(), Path.write_text, []

    def write_slowly(path: Path, text: str, **options: Any) -> int:
        write(path, text[:10], **options)
        seen.append((run / RUN).read_text())
        return write(path, text, **options)

    monkeypatch.setattr(Path, "write_text", write_slowly)
    record_run(run, {**json.loads(before), "LoRA rank": 8})
    assert seen == [before]
    assert json.loads((run / RUN).read_text())["LoRA rank"] == 8


def test_the_report_loads_nothing_and_links_to_logs_that_are_there(run: Path) -> None:
    page = page_of(run)
    links = Links()
    links.feed(page)
    assert not links.loaded
    assert not re.search(r"(src|href)=.?https?:|@import|url\(", page)
    assert len(links.found) == 2
    assert all((run / unquote(link)).is_file() for link in links.found)
    assert "by_length" in page
    assert "step 1: solver 1" in page, "the error, by its cause"
    assert "0.100 → 1.100" in page
    assert "<b>names" not in page, "names are text and not markup"


def test_an_empty_folder_has_a_report(tmp_path: Path) -> None:
    assert "no figures yet" in page_of(tmp_path)


def test_damaged_files_leave_their_part_out(run: Path) -> None:
    next(run.glob(f"{ROLLOUT_LOGS}/*.eval")).write_bytes(b"not a log")
    (run / "config.json").write_text("{")
    assert "0.100 → 1.100" in page_of(run)


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_a_figure_that_is_no_number_leaves_a_gap(run: Path, value: float) -> None:
    metric = "eval/gpqa/mean"
    rows: list[dict[str, object]] = [{"step": i, metric: i / 8} for i in range(3)]
    write_metrics(run, rows[0], {**rows[1], metric: value}, rows[2])
    page = page_of(run)
    assert "step 1: gpqa/mean 0" in page
    assert "step 2: gpqa/mean" not in page
    assert "step 3: gpqa/mean 0.25" in page


@pytest.mark.parametrize("values", [[0.5], [1.0, 1.0], [-3.0, 1e6], [0.0, 0.0], [1e-9, 2e-9]])
def test_lines_of_any_size_stay_on_the_paper(values: list[float]) -> None:
    steps = [Step(index, {"a": value}, []) for index, value in enumerate(values)]
    drawing = draw_chart(Chart("", "", {"line": "a"}, from_zero=False), steps)
    places = re.findall(r'cx="([-\d.]+)" cy="([-\d.]+)"', drawing)
    assert len(places) == len(values)
    for x, y in places:
        assert 0 <= float(x) <= 560
        assert 0 <= float(y) <= 230


def test_a_run_that_learned_nothing_says_so_on_top(run: Path) -> None:
    silent = {"env/all/by_group/frac_mixed": 0.0, "env/all/reward/total": 0.0}
    rows = [{"step": i, **silent, "optim/kl_sample_train_v1": 0.5} for i in (0, 1)]
    write_metrics(run, *rows)
    page = page_of(run)
    assert "In 2 of 2 steps, no group had different rewards" in page
    assert "groups with a signal" in page
    rows[1]["env/all/by_group/frac_mixed"] = 0.5
    write_metrics(run, *rows)
    assert "In 1 of 2 steps, no group had different rewards" in page_of(run)


def test_losses_and_evaluations_are_drawn_by_their_names(run: Path) -> None:
    row = {"step": 0, "env/all/continued_lossy": 0.125, "optim/loss": 0.25, "eval/gpqa/mean": 0.375}
    write_metrics(run, row)
    (run / "evaluations").mkdir()
    log = next(run.glob(f"{ROLLOUT_LOGS}/*.eval"))
    (run / "evaluations" / "gpqa.eval").write_bytes(log.read_bytes())
    page = page_of(run)
    assert "loss 0.25" in page
    assert "lossy" not in page
    assert "gpqa/mean 0.375" in page
    assert 'href="evaluations/gpqa.eval"' in page


def test_the_page_is_titled_with_the_tasks_name_and_counts_from_one(run: Path) -> None:
    (run / "run.json").write_text(json.dumps({"task": "/a/folder/toy.py@letters", "model": "m"}))
    page = page_of(run)
    assert "<h1>letters</h1>" in page
    assert "<title>letters: training</title>" in page
    assert "<td>1</td>" in page
    assert "<td>0</td><td>0.100</td>" not in page


def test_mixed_tasks_have_their_own_logs_and_lines(tmp_path: Path) -> None:
    mixed = [two_samples("sums"), two_samples("names")]
    roll_out(as_rl_mixture, mixed, tmp_path / ROLLOUT_LOGS, batch_size=2)
    (tmp_path / "run.json").write_text(json.dumps({"task": ["a.py@sums", "b.py@names"]}))
    row = {"step": 0, "env/sums/reward/total": 0.25, "env/names/reward/total": 0.5}
    write_metrics(tmp_path, row)
    history = read_history(tmp_path)
    assert [len(step.logs) for step in history.steps] == [2, 2]
    assert [step.figures["rollouts/graded"] for step in history.steps] == [2, 2]
    page = page_of(tmp_path)
    assert "<h1>sums, names</h1>" in page
    assert "step 1: sums 0.25" in page
    links = Links()
    links.feed(page)
    assert len(links.found) == 4
