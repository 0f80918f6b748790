"""The provider works wherever Inspect takes a model, and with hundreds of samples at once."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import tinker
from click.testing import CliRunner
from inspect_ai import Task, eval_async, eval_set, score
from inspect_ai.dataset import Sample
from inspect_ai.log import read_eval_log
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes
from tests.evaluate.test_provider import Client, model
from tests.packages import run

from inspect_tinker_plugin.cli.main import rl
from inspect_tinker_plugin.testing.policy import load_tokenizer
from tinker_local import LocalServer


class Echo(Client):
    """Says the number in the prompt, once so many calls wait for their answer."""

    def __init__(self, together: int) -> None:
        super().__init__()
        self._together = together
        self._all = asyncio.Event()

    async def sample(self, prompt: Any, count: int, params: Any, **further: Any) -> Any:
        self.at_once += 1
        if self.at_once == self._together:
            self._all.set()
        await self._all.wait()
        [number] = re.findall(r"number (\d+)", load_tokenizer().decode(prompt.to_ints()))
        return await Client(f"{number}<|im_end|>").sample(prompt, count, params, **further)


@pytest.mark.slow
async def test_two_hundred_samples_at_once_get_their_own_answers(tmp_path: Path) -> None:
    samples = [Sample(input=f"Say number {each}.", target=f"{each}") for each in range(1000, 1200)]
    [log] = await eval_async(
        Task(dataset=samples, scorer=includes()),
        model=model(Echo(200)),
        max_connections=200,
        max_samples=200,
        log_dir=str(tmp_path),
        log_realtime=False,
    )
    assert log.status == "success", log.error
    assert log.samples is not None
    assert [each.scores["includes"].value for each in log.samples if each.scores] == ["C"] * 200


TASKS = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import Score, accuracy, includes, scorer

@scorer(metrics=[accuracy()])
def judged():
    async def score(state, target):
        judge = get_model(role="grader", required=True)
        said = await judge.generate(f"Grade {state.output.completion}")
        return Score(value=1, answer=said.completion, explanation=str(judge))
    return score

@task
def fruit():
    return Task(dataset=[Sample(input="Say plum.", target="plum", id=1)], scorer=includes())

@task
def graded():
    return Task(dataset=[Sample(input="Say plum.", target="plum", id=1)], scorer=judged())
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tasks") / "tasks.py"
    path.write_text(TASKS)
    return path


@pytest.fixture(scope="module")
def name(tmp_path_factory: pytest.TempPathFactory, server: LocalServer, tiny_model: Path) -> str:
    """A run on a server that is there already; its base model has seen nothing."""
    run = tmp_path_factory.mktemp("run")
    identity = {"model": str(tiny_model), "renderer": "qwen3_instruct"}
    (run / "run.json").write_text(json.dumps(identity))
    (run / "config.json").write_text(json.dumps({"base_url": server.url, "max_tokens": 8}))
    return f"tinker/{run}@0"


@pytest.mark.local
@pytest.mark.slow
def test_an_eval_set_and_a_score_with_a_judge(name: str, file: Path, tmp_path: Path) -> None:
    done, [log] = eval_set(
        [f"{file}@fruit"], model=name, log_dir=str(tmp_path), log_dir_allow_dirty=True
    )
    assert done
    assert log.eval.model == name
    [sample] = read_eval_log(log.location).samples or []
    assert sample.output.usage is not None
    assert sample.output.usage.output_tokens in range(1, 9)  # a random model may end early
    scored = score(
        read_eval_log(log.location),
        load_judge(file),
        model_roles={"grader": get_model(name)},
        action="append",
    )
    [sample] = scored.samples or []
    assert sample.scores is not None
    assert sample.scores["judged"].explanation == name


def load_judge(file: Path) -> Any:
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    return names["judged"]()


@pytest.mark.local
@pytest.mark.slow
def test_a_judge_of_a_training(name: str, file: Path) -> None:
    words = ["rollout", f"{file}@graded", "--model-role", f"grader={name}", "--json"]
    said = CliRunner().invoke(rl, [*words, "--group-size", "2"])
    assert said.exit_code == 0, said.output
    assert [json.loads(line)["reward"] for line in said.stdout.splitlines()] == [1, 1]


@pytest.mark.local
@pytest.mark.slow
async def test_calls_at_once_share_one_client_of_the_server(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    create = tinker.ServiceClient.create_sampling_client

    def counted(self: Any, *args: Any, **how: Any) -> Any:
        made.append(how)
        return create(self, *args, **how)

    monkeypatch.setattr(tinker.ServiceClient, "create_sampling_client", counted)
    models = [get_model(name, memoize=False) for _ in range(3)]
    said = await asyncio.gather(
        *(each.generate("x", config=GenerateConfig(max_tokens=4)) for each in models * 4)
    )
    assert all(each.usage and each.usage.output_tokens in range(1, 5) for each in said)
    assert len(made) <= 1, "an earlier test may have connected"


TWICE = """
import sys
from dataclasses import replace
from pathlib import Path
from inspect_tinker_plugin.evaluate.source import connect, read_run

source = read_run(Path(sys.argv[1]), "0")
other = replace(source, temperature=0.5)
first, second = (connect(each, api_key=None).result().sampler for each in (source, other))
print(first is not second)
"""


@pytest.mark.local
@pytest.mark.nightly
def test_all_weights_of_a_local_run_have_one_server(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "local-server").mkdir()
    identity = {"model": str(tiny_model), "renderer": "qwen3_instruct"}
    (tmp_path / "run.json").write_text(json.dumps(identity))
    assert run(sys.executable, "-c", TWICE, tmp_path) == "True\n"
