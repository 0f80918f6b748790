"""Peak memory of exports of logs with 1,000 and with 10,000 samples, in each form.

The smaller log is that of an eval of a two-turn task with Inspect's mock model: two epochs, one of
them right. The larger log has its samples again and again, under other ids. Each export runs in a
fresh process. Prints the peaks of their resident sets and the ratio.
Run ``python -m benchmarks.log_exports [--sizes 1000 10000]``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

os.environ.setdefault("INSPECT_DISPLAY", "none")

LIMIT = 1.15
"""Of the ratio of the peaks."""

EPOCHS = 2
WORDS = "and then we look at the next number, which is a little larger than the last one; " * 12


def make_log(folder: Path, samples: int) -> None:
    """Log an eval with so many samples, the epochs counted separately."""
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import ChatMessage, GenerateConfig, ModelOutput, ModelUsage, get_model
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate, user_message
    from inspect_ai.tool import ToolChoice, ToolInfo

    def make_output(text: str) -> ModelOutput:
        output = ModelOutput.from_content("mockllm", text)
        # Otherwise Inspect would count tokens, by a table that it downloads.
        output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
        return output

    asked: dict[str, int] = {}

    def answer(
        messages: list[ChatMessage], tools: list[ToolInfo], choice: ToolChoice, config: Any
    ) -> ModelOutput:
        assert isinstance(config, GenerateConfig)
        if len(messages) == 1:
            return make_output(f"Let me think: {WORDS}")
        question = messages[0].text
        asked[question] = asked.get(question, 0) + 1
        right = asked[question] == 1
        return make_output("the next" if right else "no idea")

    data = [
        Sample(id=i, input=f"What is after {i}? {WORDS}", target="next")
        for i in range(samples // EPOCHS)
    ]
    task = Task(
        dataset=data,
        solver=[generate(), user_message("So?"), generate()],
        scorer=includes(),
        epochs=EPOCHS,
    )
    model = get_model("mockllm/model", custom_outputs=answer)
    (log,) = eval(task, model=model, log_dir=str(folder), log_realtime=False, max_samples=32)
    assert log.status == "success", log.error


def repeat_log(source: Path, folder: Path, times: int) -> None:
    """Write a log with the samples of another one, several times."""
    from inspect_ai.log import read_eval_log, write_eval_log

    (path,) = source.glob("*.eval")
    log = read_eval_log(str(path))
    assert log.samples is not None
    log.samples = [
        sample.model_copy(update={"id": f"{sample.id}-{time}", "uuid": f"{sample.uuid}-{time}"})
        for time in range(times)
        for sample in log.samples
    ]
    folder.mkdir()
    write_eval_log(log, str(folder / path.name))


def export(source: Path, form: str, output: Path) -> None:
    """Export, and print the rows and the peak of this process in MB."""
    from inspect_tinker_plugin.export.from_logs import export_logs
    from inspect_tinker_plugin.export.options import Choice, LogExportOptions

    options = LogExportOptions(choice=Choice(form=form))  # type: ignore[arg-type]  # one of FORMS
    report = asyncio.run(export_logs([str(source)], output, options))
    assert not report.failures
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(report.written, peak / (1e6 if sys.platform == "darwin" else 1e3))


def measured(*work: str) -> str:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.log_exports", *work]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def main(sizes: list[int]) -> bool:
    from inspect_tinker_plugin.export.options import Form

    met = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small, large = (folder / f"logs-{size}" for size in sizes)
        measured("make", str(small), str(sizes[0]))
        measured("repeat", str(small), str(large), str(sizes[1] // sizes[0]))
        for form in get_args(Form):
            peaks = []
            for size in sizes:
                source, output = folder / f"logs-{size}", folder / f"{form}-{size}"
                rows, peak = measured("export", str(source), form, str(output)).split()[-2:]
                peaks.append(float(peak))
                print(f"{form:<11}{size:>7} samples {rows:>7} rows  peak {peaks[-1]:6.0f} MB")
            ratio = peaks[-1] / peaks[0]
            met = met and ratio <= LIMIT
            verdict = "met" if ratio <= LIMIT else "missed"
            print(f"{form:<11}ratio {ratio:.2f} (at most {LIMIT}: {verdict})", flush=True)
    return met


if __name__ == "__main__":
    if sys.argv[1:2] == ["make"]:
        make_log(Path(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1:2] == ["repeat"]:
        repeat_log(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1:2] == ["export"]:
        export(Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
    else:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--sizes", type=int, nargs=2, default=[1_000, 10_000])
        sys.exit(0 if main(parser.parse_args().sizes) else 1)
