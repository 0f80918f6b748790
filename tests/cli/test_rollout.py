"""`inspect rl rollout`: real tasks and tokens, a scripted policy, and the printed output."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from inspect_ai.log import read_eval_log
from inspect_ai.model import ModelOutput

from inspect_tinker_plugin.cli.rollout import rollout
from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.testing import tokenizer_path
from inspect_tinker_plugin.testing.replies import read_script

FOLDER = Path(__file__).parents[2] / "example_tasks"
LOG_SEARCH = f"{FOLDER / 'log_search.py'}@log_search"
SCRIPT = str(FOLDER / "scripts" / "log_search.jsonl")


def run(*args: str) -> Result:
    return CliRunner().invoke(rollout, list(args))


def reports(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_scripted_group_of_an_agent_is_shown_with_rewards() -> None:
    result = run(LOG_SEARCH, "--script", SCRIPT)
    assert result.exit_code == 0, result.output
    for seen in (
        "rollout 1 of sample monday-failures",
        "Which user had the most failed logins",
        "grep failed service.log | grep -o 'user=[a-z]*' | sort | uniq -c | sort -rn",
        "     14 user=deploy",
        "reward 1.00",
        "in 1 training sequence",
        "4 rollouts",
    ):
        assert seen in result.stdout, seen


@pytest.mark.parametrize(
    ("given", "says"),
    [("-1", "-1.0 is not in the range x>=0"), ("nan", "'nan' is not a number")],
)
def test_an_impossible_temperature_is_refused(given: str, says: str) -> None:
    result = run(LOG_SEARCH, "--temperature", given)
    assert result.exit_code == 2
    assert says in result.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "--local needs --model tinker://"),
        (("--model", "Qwen/Qwen3-8B"), "--local needs --model tinker://"),
        (("--model", "tinker://a", "--base-url", "http://x"), "leave --base-url out"),
        (("--model", "tinker://a"), "no run of `inspect rl train`"),
    ],
    ids=str,
)
def test_a_local_server_needs_weights_of_a_local_run(
    options: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    result = run(LOG_SEARCH, "--local", str(tmp_path), *options)
    assert result.exit_code == 2
    assert says in result.output
    run_of_a_service = {"model": "Qwen/Qwen3-8B", "renderer": "qwen3"}
    (tmp_path / "run.json").write_text(json.dumps(run_of_a_service))
    result = run(LOG_SEARCH, "--local", str(tmp_path), "--model", "tinker://a")
    assert "that run was not trained with --local" in result.output


def test_rewards_and_advantages_of_a_group_which_a_group_reward_changes() -> None:
    found = reports(run(LOG_SEARCH, "--script", SCRIPT, "--json"))
    assert [each["reward"] for each in found] == [1.0, 0.0, 1.0, 0.0]
    assert [each["advantage"] for each in found] == [0.5, -0.5, 0.5, -0.5]
    assert [each["turns"] for each in found] == [3, 2, 3, 2]
    assert found[0]["scores"]["match"]["value"] == "C"
    assert found[0]["messages"][0]["role"] == "system"
    assert all(each["error"] is None for each in found)
    options = ("--group-reward", "rank", "--tool-executor", "cached", "--max-sandboxes", "1")
    ranked = reports(run(LOG_SEARCH, "--script", SCRIPT, "--json", *options))
    assert [each["scores"] for each in ranked] == [each["scores"] for each in found]
    assert [each["reward"] for each in ranked] != [each["reward"] for each in found]
    assert ranked[0]["reward"] > ranked[1]["reward"]


def test_without_a_script_the_target_is_right_and_its_neighbour_wrong() -> None:
    found = reports(run(str(FOLDER / "word_problems.py"), "--json", "--limit", "2"))
    assert [each["sample_id"] for each in found] == ["apples"] * 4 + ["train"] * 4
    assert [each["reward"] for each in found] == [1.0, 0.0, 1.0, 0.0] * 2


def test_samples_and_task_arguments_are_chosen_as_for_an_eval() -> None:
    spec = f"{FOLDER / 'toy.py'}@letters"
    chosen = ("-T", "allowed=xyz", "--sample-id", "3,5", "--group-size", "1", "--json")
    found = reports(run(spec, *chosen))
    assert [each["sample_id"] for each in found] == [3, 5]
    assert found[0]["messages"][0]["content"] == "3. Write some of these letters: xyz"


def test_a_failed_rollout_is_none_and_never_zero(tmp_path: Path) -> None:
    result = run(str(FOLDER / "article_summary.py"), "--json", "--group-size", "2")
    assert result.exit_code == 1
    for each in reports(result):
        assert each["reward"] is None
        assert each["advantage"] is None
        assert "[judge]" in each["error"]
        assert "grader" in each["error"]


def test_a_script_that_ends_too_early_fails_its_rollout_only(tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    submit = {"tool_calls": [{"name": "submit", "arguments": {"answer": "deploy"}}]}
    script.write_text(f'["Let me think."]\n{json.dumps([submit])}\n', encoding="utf-8")
    result = run(LOG_SEARCH, "--script", str(script), "--group-size", "2", "--json")
    first, second = reports(result)
    assert result.exit_code == 3
    assert "the script has 1 replies" in first["error"]
    assert first["turns"] == 1, "those that it had"
    assert first["input_tokens"] > 0 < first["output_tokens"]
    assert (second["reward"], second["error"]) == (1.0, None)
    assert "1 of 2 rollouts failed" in result.stderr


def test_the_log_is_there_when_the_command_returns(tmp_path: Path) -> None:
    result = run(str(FOLDER / "word_problems.py"), "--log-dir", str(tmp_path), "--show", "0")
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("*.eval")
    log = read_eval_log(path)
    assert log.status == "success"
    assert [sample.id for sample in log.samples or []] == ["apples"] * 4
    rewards = [(s.scores or {})["reward"].value for s in log.samples or []]
    assert rewards == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ("assemble_pending", "could not be written to {}: [Errno 28] No space left"),
        ("writer.write_part", "of 1 group could not be written to {}: no log has them"),
    ],
    ids=["log", "group"],
)
def test_rollouts_are_shown_though_their_log_cannot_be_written(
    step: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"inspect_tinker_plugin.logs.{step}", full)
    result = run(str(FOLDER / "word_problems.py"), "--log-dir", str(tmp_path), "--json")
    assert result.exit_code == 1
    assert len(reports(result)) == 4
    assert reason.format(tmp_path) in result.stderr


def test_a_stated_penalty_takes_the_place_of_a_failure() -> None:
    summary = (str(FOLDER / "article_summary.py"), "--group-size", "2", "--on-error", "judge=-0.5")
    result = run(*summary, "--json")
    assert result.exit_code == 0, result.output
    for each in reports(result):
        assert each["reward"] == -0.5
        assert "grader" in each["error"]
    assert "reward -0.50 (stated with --on-error)" in run(*summary).stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([LOG_SEARCH, "--script", "none.jsonl", "--model", "m"], "does not go with --model"),
        ([LOG_SEARCH, "--base-url", "http://localhost"], "--base-url needs --model"),
        ([LOG_SEARCH, "--score-file", "*.py"], "are for a clean sandbox: score_sandbox='fresh'"),
        ([LOG_SEARCH, "--script", "none.jsonl"], "the script none.jsonl cannot be read"),
        ([LOG_SEARCH, "--renderer", "qwen99"], "no renderer qwen99"),
        ([LOG_SEARCH, "--reward", "nonsense"], "nonsense"),
        ([LOG_SEARCH, "--group-reward", "nonsense"], "nonsense"),
        ([LOG_SEARCH, "--tool-executor", "nonsense"], "nonsense"),
        ([LOG_SEARCH, "--on-error", "zero"], "expected 'raise' or a number, not 'zero'"),
        ([LOG_SEARCH, "--on-error", "weather=0"], "unknown cause 'weather'"),
        ([LOG_SEARCH, "--on-error", "0", "--on-error", "tool=1"], "goes with no other rule"),
        ([LOG_SEARCH, "--on-error", "tool=0", "--on-error", "tool=1"], "given twice"),
        ([LOG_SEARCH, "--on-error", "=1"], "names no cause"),
        ([f"{FOLDER / 'log_search.py'}@nothing"], "has no task 'nothing'"),
        ([LOG_SEARCH, "--sample-id", "sunday"], "sunday"),
    ],
)
def test_bad_input_is_one_clear_line(args: list[str], message: str) -> None:
    result = run(*args)
    assert result.exit_code in (1, 2)
    assert message in result.stderr.splitlines()[-1]
    assert result.stdout == ""


def test_sampling_without_a_key_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    options = ("--tokenizer", str(tokenizer_path()), "--renderer", "qwen3_instruct")
    result = run(LOG_SEARCH, "--model", "Qwen/Qwen3-8B", *options)
    assert result.exit_code == 1
    assert "TINKER_API_KEY" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no replies"),
        ('"a"\n["b"]\n', "line 2: the script mixes"),
        ('{"txt": "a"}', "line 1.*no key 'txt'"),
        ('"a"\n{"text"', "line 2: Invalid JSON: EOF"),
        (r'"\ud800"', "line 1: Invalid JSON: unexpected end of hex escape"),
        ("3", "line 1"),
    ],
)
def test_a_bad_script_is_refused(tmp_path: Path, text: str, message: str) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_script(script)


def test_a_script_of_plain_lines_is_one_episode(tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_bytes('\ufeff"first"\r\n\n{"text": "sec\u2028ond\u0085"}\n'.encode())
    (episode,) = read_script(script)
    assert [reply.completion for reply in episode if isinstance(reply, ModelOutput)] == [
        "first",
        "sec\u2028ond\u0085",
    ]


def test_a_reply_over_max_tokens_is_cut_and_says_so() -> None:
    spec = str(FOLDER / "word_problems.py")
    (found,) = reports(run(spec, "--max-tokens", "2", "--group-size", "1", "--json"))
    assert found["output_tokens"] == 2
    assert found["stop"] == "max_tokens"


def test_a_score_that_is_no_number_is_strict_json(tmp_path: Path) -> None:
    file = tmp_path / "odd.py"
    file.write_text(
        "from inspect_ai import Task, task\nfrom inspect_ai.dataset import Sample\n"
        "from inspect_ai.scorer import Score, mean, scorer\n\n"
        "@scorer(metrics=[mean()])\ndef odd():\n"
        "    async def score(state, target):\n        return Score(value=float('nan'))\n\n"
        "    return score\n\n"
        "@task\ndef odd_task():\n    return Task([Sample(input='a', target='a')], scorer=odd())\n"
    )
    result = run(str(file), "--group-size", "1", "--json")
    found = json.loads(result.stdout, parse_constant=pytest.fail)
    assert found["scores"]["odd"]["value"] == "NaN"
    assert "[unscored]" in found["error"]


def test_terminal_codes_of_a_model_do_not_reach_the_terminal(tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text(json.dumps("\x1b[2J\x1b]0;owned\x07ANSWER: 155") + "\n", encoding="utf-8")
    result = run(str(FOLDER / "word_problems.py"), "--script", str(script), "--group-size", "1")
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout
    assert "ANSWER: 155" in result.stdout


def test_a_task_is_made_once(tmp_path: Path) -> None:
    file = tmp_path / "warned.py"
    file.write_text(
        "import sys\nfrom inspect_ai import Task, task\nfrom inspect_ai.dataset import Sample\n"
        "from inspect_ai.scorer import includes\n\n@task\ndef warned():\n"
        "    print('made', file=sys.stderr)\n"
        "    return Task([Sample(input='a', target='a')], scorer=includes())\n"
    )
    result = run(str(file))
    assert result.exit_code == 0, result.output
    assert result.stderr.count("made") == 1
