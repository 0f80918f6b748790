"""Every example task runs under Inspect and distinguishes right answers from wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import inspect_ai
import pytest
from inspect_ai.log import EvalSample
from tests.example_tasks.conftest import FOLDER, RunSamples, values

from inspect_tinker_plugin.tasks.reference import resolve_task
from inspect_tinker_plugin.testing import Script, call, say, scripted_model, submit

RIGHT_CODE = """Here it is.

```python
def running_total(numbers):
    totals = []
    for number in numbers:
        totals.append(number + (totals[-1] if totals else 0))
    return totals
```
"""


@pytest.fixture
def run(run_samples: RunSamples) -> Callable[..., EvalSample]:
    """Run one sample of an example task with a scripted model; return its log."""

    def run_sample(
        spec: str,
        sample_id: str | int,
        script: Script,
        *,
        grader: Script | None = None,
        **task_args: Any,
    ) -> EvalSample:
        [sample] = run_samples(
            spec, script, grader=grader, sample_id=sample_id, task_args=task_args
        )
        return sample

    return run_sample


def score_of(sample: EvalSample) -> Any:
    [value] = values([sample]).values()
    return value


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("7 x 24 = 168, less 13.\nANSWER: 155", "C"),
        ("7 x 24 = 168.\nANSWER: 168", "I"),
        ("I do not know.", "I"),
    ],
    ids=["right", "wrong", "none"],
)
def test_word_problems(run: Callable[..., EvalSample], reply: str, value: str) -> None:
    assert score_of(run("word_problems.py@word_problems", "apples", [reply])) == value


@pytest.mark.parametrize(("reply", "value"), [("ANSWER: A", "C"), ("ANSWER: B", "I")])
def test_science_quiz(run: Callable[..., EvalSample], reply: str, value: str) -> None:
    assert score_of(run("science_quiz.py@science_quiz", "boiling", [reply])) == value


def test_science_quiz_finds_the_right_answer_after_shuffling(
    run: Callable[..., EvalSample],
) -> None:
    def answer(request: Any) -> str:
        lines = request.messages[-1].text.splitlines()
        (letter,) = [line[0] for line in lines if line.endswith("The air pressure is lower")]
        return f"It is about pressure.\n\nANSWER: {letter}"

    sample = run("science_quiz.py@science_quiz", "boiling", answer, shuffle_seed=3, cot=True)
    assert sample.target != "A"
    assert score_of(sample) == "C"


COUNT_USERS = say(
    "I count the failed logins by user.",
    call("bash", command="grep failed service.log | grep -o 'user=[a-z]*' | sort | uniq -c"),
)


@pytest.mark.parametrize(("answer", "value"), [("deploy", "C"), ("carol", "I")])
def test_log_search(run: Callable[..., EvalSample], answer: str, value: str) -> None:
    sample = run("log_search.py@log_search", "monday-failures", [COUNT_USERS, submit(answer)])
    assert "14 user=deploy" in sample.messages[3].text
    assert score_of(sample) == value


@pytest.mark.parametrize(
    ("sample_id", "command"),
    [
        (
            "tuesday-failures",
            "grep failed service.log | grep -o 'user=[a-z]*' | sort | uniq -c | sort -n | tail -1"
            " | cut -d= -f2",
        ),
        (
            "wednesday-errors",
            "grep 'web 500' service.log | grep -o '/[^ ]*' | sort | uniq -c | sort -n | tail -1"
            " | grep -o '/.*'",
        ),
        (
            "monday-first",
            "grep 'failed user=deploy' service.log | head -1 | cut -d' ' -f2",
        ),
        ("wednesday-missing", "grep -c 'web 404' service.log"),
    ],
    ids=["most failures", "most errors", "first", "count"],
)
def test_the_answers_of_log_search_are_in_its_logs(
    run: Callable[..., EvalSample], sample_id: str, command: str
) -> None:
    script = [
        say("", call("bash", command=command)),
        lambda request: submit(request.messages[-1].text.strip()),
    ]
    assert score_of(run("log_search.py@log_search", sample_id, script)) == "C"


def test_log_search_gives_another_attempt(run: Callable[..., EvalSample]) -> None:
    script = [submit("bob"), submit("deploy")]
    sample = run("log_search.py@log_search", "monday-failures", script, attempts=2)
    assert score_of(sample) == "C"


@pytest.mark.parametrize(
    ("reply", "value", "explanation"),
    [
        (RIGHT_CODE, "C", "All calls give the right values."),
        ("```python\ndef running_total(numbers):\n    return numbers\n```", "I", "got [1, 2, 3]"),
        ("def running_total(numbers) return", "I", "SyntaxError"),
        ("I cannot do that.", "I", "SyntaxError"),
    ],
    ids=["right", "wrong", "no code block", "no code"],
)
def test_write_function(
    run: Callable[..., EvalSample], reply: str, value: str, explanation: str
) -> None:
    sample = run("write_function.py@write_function", "running_total", [reply])
    assert score_of(sample) == value
    assert sample.scores is not None
    assert explanation in str(sample.scores["gives_right_values"].explanation)


@pytest.mark.docker
def test_a_sandbox_task_runs_in_docker(
    run: Callable[..., EvalSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXAMPLE_TASKS_IMAGE", "inspect-rl-test/python:1")
    where = say("", call("bash", command="pwd; ls /.dockerenv service.log"))
    script = [where, COUNT_USERS, submit("deploy")]
    # no sandbox is named: the engine is here, with the image
    sample = run("log_search.py@log_search", "monday-failures", script)
    assert "/.dockerenv" in sample.messages[3].text
    assert score_of(sample) == "C"


@pytest.mark.parametrize("name", ["log_search", "write_function"])
def test_without_an_engine_a_task_runs_here_and_warns(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    task = resolve_task(f"{FOLDER / name}.py").task
    assert task.sandbox is not None
    assert task.sandbox.type == "local"
    assert "read the answers and all your files; Docker gives" in capfd.readouterr().err


def desk_script(train: str, price: int) -> Mapping[str, list[Any]]:
    """The replies of the three agents, which are recognised by the tools that they are offered."""
    return {
        "timetable_expert": [
            say("The expert knows.", call("timetable_expert", input="Northport before noon?")),
            say("Now the fare.", call("transfer_to_ticket_clerk")),
            submit(f"{train} for {price} crowns"),
        ],
        "trains_to": [say("", call("trains_to", destination="Northport")), submit(train)],
        "fare": [say("", call("fare", train=train)), say(f"{train} costs {price} crowns.")],
    }


@pytest.mark.parametrize(
    ("train", "price", "value"), [("N2", 84, "C"), ("N3", 70, "I")], ids=["right", "wrong"]
)
def test_travel_desk(run: Callable[..., EvalSample], train: str, price: int, value: str) -> None:
    replies = desk_script(train, price)
    seen: list[str] = []

    def answer(request: Any) -> Any:
        names = {tool.name for tool in request.tools}
        (agent,) = names & replies.keys()
        seen.append(agent)
        return replies[agent].pop(0)

    sample = run("travel_desk.py@travel_desk", "north", answer)
    assert score_of(sample) == value
    expected = ["timetable_expert", "trains_to", "trains_to"]
    expected += ["timetable_expert", "fare", "fare", "timetable_expert"]
    assert seen == expected


@pytest.mark.parametrize(
    ("grade", "value"), [("GRADE: C", "C"), ("GRADE: P", "P"), ("GRADE: I", "I")]
)
def test_article_summary_is_graded_by_the_grader(
    run: Callable[..., EvalSample], grade: str, value: str
) -> None:
    summary = "Keepers lived there; a fire put it out for five years; today it is automatic."
    asked: list[str] = []

    def grader(request: Any) -> str:
        asked.append(request.messages[-1].text)
        return f"It is all there.\n{grade}"

    sample = run("article_summary.py@article_summary", "lighthouse", [summary], grader=grader)
    assert score_of(sample) == value
    assert summary in asked[0]
    assert "automated today" in asked[0]


def test_article_summary_does_not_let_a_model_grade_itself(tmp_path: Path) -> None:
    (log,) = inspect_ai.eval(
        f"{FOLDER / 'article_summary.py'}@article_summary",
        model=scripted_model(["A summary.", "GRADE: C"]),
        limit=1,
        log_dir=str(tmp_path),
        display="none",
    )
    assert log.status == "error"
    assert log.error is not None
    assert "grader" in log.error.message


@pytest.mark.parametrize(
    ("reply", "value"), [("abcabc", 1.0), ("abyz", 0.5), ("nothing", 3 / 7), ("", 0.0)]
)
def test_letters_pays_the_share_of_allowed_letters(
    run: Callable[..., EvalSample], reply: str, value: float
) -> None:
    assert score_of(run("toy.py@letters", 1, [reply])) == pytest.approx(value)


@pytest.mark.parametrize(
    ("opened", "word", "value"), [([3], None, "C"), ([1, 3], None, "C"), ([1], "sea", "I")]
)
def test_boxes_pays_the_word_that_was_found(
    run: Callable[..., EvalSample], opened: list[int], word: str | None, value: str
) -> None:
    calls: list[Any] = [say("", call("open_box", box=box)) for box in opened]
    calls.append(lambda request: submit(word or request.messages[-1].text))
    sample = run("boxes.py@boxes", 1, calls)
    found = [message.text for message in sample.messages if message.role == "tool"][: len(opened)]
    assert found == [str(sample.target) if box == 3 else "empty" for box in opened]
    assert score_of(sample) == value
