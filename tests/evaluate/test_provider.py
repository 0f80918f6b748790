"""The provider `tinker`: what it honours and refuses, and what it says when it cannot sample."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tinker
from inspect_ai import Task, eval_async
from inspect_ai._util.error import PrerequisiteError  # private: how Inspect reports bad input
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessage,
    ChatMessageUser,
    CompactionTrim,
    GenerateConfig,
    Model,
    ResponseSchema,
    compaction,
    get_model,
)
from inspect_ai.solver import Generate, TaskState
from inspect_ai.tool import ToolInfo
from inspect_ai.util import JSONSchema
from tests.functions import make_solver

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.evaluate import provider, source
from inspect_tinker_plugin.evaluate.provider import (
    HONOURED,
    OF_INSPECT,
    TinkerAPI,
    connected_model,
)
from inspect_tinker_plugin.evaluate.source import Connection, Source, find_source
from inspect_tinker_plugin.testing.policy import load_renderer, load_tokenizer
from tinker_local import LocalServer


class Client:
    """Samples the same words for every prompt, and keeps what it was asked."""

    def __init__(self, *replies: str, cached: int = 0, supports: bool = True) -> None:
        self.replies = replies or ("plum<|im_end|>",)
        self.cached = cached
        self.supports = supports
        self.asked: list[dict[str, Any]] = []
        self.at_once = self.most_at_once = 0

    async def sample(self, prompt: Any, count: int, params: Any, **further: Any) -> Any:
        self.asked.append({"prompt": prompt, "count": count, "params": params, **further})
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        tops = further["topk_sample_logprobs"]
        sequences = []
        for number in range(count):
            tokens = load_tokenizer().encode(self.replies[number % len(self.replies)])
            ended = tokens[-1] == load_tokenizer().encode("<|im_end|>")[0]
            sequences.append(
                tinker.SampledSequence(
                    stop_reason="stop" if ended else "length",
                    sequence_id=str(number),
                    _tokens_list=tokens[: params.max_tokens],
                    _logprobs_list=[-0.5] * len(tokens),
                    _topk_logprobs_list=(
                        [[(token, -0.5), (0, -1.5)] for token in tokens]
                        if tops and self.supports
                        else None
                    ),
                )
            )
        wanted = further["include_prompt_logprobs"]
        return tinker.SampleResponse(
            sequences=sequences,
            prompt_cache_hit_tokens=self.cached,
            _prompt_logprobs_list=[None, *[-0.25] * (prompt.length - 1)] if wanted else None,
        )


def model(client: Client, *, window: int | None = None, renderer: str = "qwen3_instruct") -> Model:
    source = Source(base_model="tiny", max_tokens=64, temperature=0.7)
    sampler: Any = client
    return connected_model(
        Connection(source=source, sampler=sampler, renderer=load_renderer(renderer), window=window),
        GenerateConfig(),
    )


async def test_options_reach_the_sampler() -> None:
    client = Client()
    config = GenerateConfig(
        temperature=0.2, top_p=0.9, top_k=7, seed=3, max_tokens=5, stop_seqs=["\n"]
    )
    await model(client).generate("Say plum.", config=config)
    [asked] = client.asked
    params = asked["params"]
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.2, 0.9, 7, 3)
    assert params.max_tokens == 5
    assert load_tokenizer().encode("\n")[0] in params.stop


async def test_compaction_keeps_to_the_window() -> None:
    strategy = CompactionTrim(threshold=0.5, preserve=0.5)
    trim = compaction(strategy, prefix=[], model=model(Client(), window=600))
    messages: list[ChatMessage] = [ChatMessageUser(content="plum " * 30) for _ in range(4)]
    shorter, _ = await trim.compact_input(messages)
    assert 0 < len(shorter) < len(messages)


async def test_without_options_a_reply_is_sampled_as_in_the_run() -> None:
    client = Client()
    output = await model(client).generate("Say plum.")
    params = client.asked[0]["params"]
    assert (params.temperature, params.max_tokens, params.seed) == (0.7, 64, None)
    assert (params.top_p, params.top_k) == (1.0, -1)
    assert (output.completion, output.stop_reason) == ("plum", "stop")


async def test_choices_are_sampled_together_and_each_may_be_continued() -> None:
    client = Client("plum<|im_end|>", "pear<|im_end|>")
    asked = model(client)
    messages: list[Any] = [ChatMessageUser(content="Say a fruit.")]
    output = await asked.generate(messages, config=GenerateConfig(num_choices=2))
    assert [choice.message.text for choice in output.choices] == ["plum", "pear"]
    assert client.asked[0]["count"] == 2
    first = client.asked[0]["prompt"].to_ints()
    for choice, said in zip(output.choices, client.replies, strict=True):
        await asked.generate([*messages, choice.message, ChatMessageUser(content="Again.")])
        begun = [*first, *load_tokenizer().encode(said)]
        assert client.asked[-1]["prompt"].to_ints()[: len(begun)] == begun


@pytest.mark.parametrize(("bound", "most"), [("_MOST_TOKENS", 7_000), ("_MOST_CONVERSATIONS", 6)])
async def test_a_conversation_continues_its_tokens_whatever_others_ask_in_between(
    bound: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept is bounded: of many conversations, the newest continue theirs."""
    monkeypatch.setattr(provider, bound, most)
    client = Client('<tool_call>\n{"name":"pick", "arguments":{}}\n</tool_call><|im_end|>')
    asked, pick = model(client), ToolInfo(name="pick", description="Picks a fruit.")
    kept: dict[int, list[bool]] = {1: [], 6: []}
    for others in (1, 6):
        messages: list[Any] = [ChatMessageUser(content=f"{others} others.")]
        begun: list[int] = []
        for turn in range(3):
            for other in range(others):
                await asked.generate(f"{turn}, {other}")
            reply = (await asked.generate(messages, tools=[pick])).message
            messages += [reply, ChatMessageUser(content="Again.")]
            prompt = client.asked[-1]["prompt"].to_ints()
            kept[others].append(prompt[: len(begun)] == begun)
            begun = [*prompt, *load_tokenizer().encode(client.replies[0])]
    assert kept == {1: [True, True, True], 6: [True, False, False]}


async def test_log_probabilities_are_those_of_the_tokens() -> None:
    config = GenerateConfig(logprobs=True, top_logprobs=2, prompt_logprobs=1)
    client = Client()
    output = await model(client).generate("Say plum.", config=config)
    [choice] = output.choices
    assert choice.logprobs is not None
    words = choice.logprobs.content
    assert "".join(each.token for each in words) == "plum<|im_end|>"
    assert [each.logprob for each in words] == [-0.5] * len(words)
    assert words[0].top_logprobs is not None
    assert [each.logprob for each in words[0].top_logprobs] == [-0.5, -1.5]
    assert choice.prompt_logprobs is not None
    read = choice.prompt_logprobs.content
    assert len(read) == client.asked[0]["prompt"].length - 1, "the first token has none"


async def test_what_the_server_leaves_out_is_not_silently_missing() -> None:
    asked = model(Client(supports=False))
    with pytest.raises(ConfigError, match="does not honour top_logprobs"):
        await asked.generate("Say plum.", config=GenerateConfig(logprobs=True, top_logprobs=2))


async def test_usage_counts_the_prompt_once_and_tells_what_was_read_from_the_cache() -> None:
    client = Client("plum<|im_end|>", cached=4)
    output = await model(client).generate("Say plum.", config=GenerateConfig(num_choices=3))
    length, said = client.asked[0]["prompt"].length, len(load_tokenizer().encode("plum<|im_end|>"))
    assert output.usage is not None
    assert output.usage.input_tokens == length - 4
    assert output.usage.input_tokens_cache_read == 4
    assert output.usage.output_tokens == 3 * said
    assert output.usage.total_tokens == length + 3 * said


@pytest.mark.parametrize(
    ("window", "reason"), [(None, "max_tokens"), (200, "max_tokens"), (20, "model_length")]
)
async def test_a_reply_is_cut_where_tokens_end(window: int | None, reason: str) -> None:
    client = Client("plum " * 100)
    output = await model(client, window=window).generate("Say plum. " * 5)
    assert output.stop_reason == reason
    if reason == "max_tokens":
        [asked] = client.asked
        room = 64 if window is None else min(64, window - asked["prompt"].length)
        assert asked["params"].max_tokens == room


REFUSED: dict[str, Any] = {
    "best_of": 2,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "logit_bias": {1: 2.0},
    "reasoning_tokens": 100,
    "response_schema": ResponseSchema(name="s", json_schema=JSONSchema(type="object")),
    "extra_body": {"a": 1},
    "reasoning_effort": "high",
    "temperature": -1.0,
    "top_p": 2.0,
    "max_tokens": 0,
    "num_choices": 0,
}


@pytest.mark.parametrize("name", REFUSED)
async def test_other_options_are_refused_by_name(name: str) -> None:
    client = Client()
    with pytest.raises(ConfigError, match=f"cannot honour {name}"):
        await model(client).generate("x", config=GenerateConfig(**{name: REFUSED[name]}))
    assert client.asked == []


async def test_a_temperature_is_a_finite_number() -> None:
    with pytest.raises(ConfigError, match="temperature=inf"):
        await model(Client()).generate("x", config=GenerateConfig(temperature=float("inf")))


def test_every_option_of_inspect_is_honoured_its_own_or_refused() -> None:
    assert set(GenerateConfig.model_fields) >= HONOURED
    assert not HONOURED & OF_INSPECT


async def test_a_reasoning_effort_is_honoured_where_the_renderer_takes_one() -> None:
    class Effort(type(load_renderer())):  # type: ignore[misc]
        def build_generation_prompt(self, *args: Any, effort: float = 0.5, **kwargs: Any) -> Any:
            efforts.append(effort)
            return super().build_generation_prompt(*args, **kwargs)

    efforts: list[float] = []
    made = Effort(load_tokenizer())
    client: Any = Client()
    asked = connected_model(
        Connection(source=Source(base_model="t"), sampler=client, renderer=made, window=None),
        GenerateConfig(),
    )
    await asked.generate("x", config=GenerateConfig(reasoning_effort="high"))
    assert 0.9 in efforts


@make_solver
async def several_at_once(state: TaskState, generate: Generate, count: int) -> TaskState:
    said = await asyncio.gather(
        *(get_model().generate(f"Say plum {number}.") for number in range(count))
    )
    state.output = said[0]
    return state


async def test_a_sample_may_ask_several_times_at_once(tmp_path: Path) -> None:
    client = Client()
    task = Task(dataset=[Sample(input="x") for _ in range(2)], solver=several_at_once(5))
    [log] = await eval_async(task, model=model(client), log_dir=str(tmp_path))
    assert log.status == "success", log.error
    assert len(client.asked) == 10
    assert client.most_at_once > 2


def write_run(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    identity = {"model": "Qwen/Qwen3-8B", "renderer": "qwen3", "LoRA rank": 8}
    (folder / "run.json").write_text(json.dumps(identity))
    (folder / "config.json").write_text(json.dumps(config))
    rows = [{"name": f"{n:06d}", "batch": n, "sampler_path": f"tinker://m/{n}"} for n in (2, 4)]
    rows.append({"name": "final", "batch": 4, "sampler_path": "tinker://m/final"})
    (folder / "checkpoints.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_temperature_of_zero_is_one(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", temperature=0.0)
    assert find_source(str(run), has_key=True).temperature == 0.0


def test_a_folder_above_a_run_may_have_an_at_sign_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "ann@example.org").mkdir()
    run = write_run(tmp_path / "ann@example.org" / "run")
    assert find_source(str(run), has_key=True).run == run
    assert find_source(f"{run}@2", has_key=True).weights == "tinker://m/2"


def test_a_run_tells_how_its_weights_are_sampled(tmp_path: Path) -> None:
    window = {"context_window": 4096}
    run = write_run(
        tmp_path / "run",
        max_tokens=128,
        temperature=0.8,
        base_url="https://there",
        dataset_builder=window,
    )
    source = find_source(str(run), has_key=True)
    assert source.weights == "tinker://m/final"
    assert (source.base_model, source.renderer, source.step) == ("Qwen/Qwen3-8B", "qwen3", 4)
    assert (source.max_tokens, source.temperature) == (128, 0.8)
    assert (source.base_url, source.context_window, source.local) == ("https://there", 4096, False)
    assert find_source(f"{run}@2", has_key=True).weights == "tinker://m/2"
    base = find_source(f"{run}@0", has_key=True)
    assert (base.weights, base.base_model) == (None, "Qwen/Qwen3-8B")
    (run / "local-server").mkdir()
    assert find_source(str(run)).local, "no key is needed"
    moved = {"model": str(tmp_path / "before" / "tiny-model"), "renderer": "qwen3"}
    (run / "run.json").write_text(json.dumps(moved))
    with pytest.raises(ConfigError, match="a local run cannot be moved"):
        find_source(str(run))


async def test_newer_weights_of_a_run_are_not_answered_from_the_cache_of_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    monkeypatch.setenv("INSPECT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)  # Inspect keeps nothing for models with an absolute path
    run = write_run(Path("run"))

    async def say(client: Any) -> tuple[str, str]:
        named = get_model(f"tinker/{run}", memoize=False)
        assert isinstance(named.api, TinkerAPI)
        named.api._connection = Connection(
            source=named.api.source, sampler=client, renderer=load_renderer(), window=None
        )
        output = await named.generate("Say a fruit.", cache=True)
        return str(named), output.completion

    assert await say(Client("plum<|im_end|>")) == ("tinker/run@4", "plum")
    assert await say(Client("pear<|im_end|>")) == ("tinker/run@4", "plum")
    row = {"name": "000006", "batch": 6, "sampler_path": "tinker://m/6"}
    with (run / "checkpoints.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    assert await say(Client("pear<|im_end|>")) == ("tinker/run@6", "pear")


def test_names_that_are_no_folder_are_checkpoints_or_base_models() -> None:
    assert find_source("tinker://m/final", has_key=True).weights == "tinker://m/final"
    assert find_source("Qwen/Qwen3-8B", has_key=True).base_model == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("name", "args", "why"),
    [
        ("{run}@3", {}, r"no weights of step '3'.*after 2, 4"),
        ("{run}@x", {}, "no weights of step 'x'"),
        ("{run}@²", {}, "no weights of step '²'"),
        ("Qwen/Qwen3-8B", {"renderer": "qwen33"}, "there is no renderer qwen33.*qwen3"),
        ("Qwen/Qwen3-8B", {"config": GenerateConfig(best_of=2)}, "cannot honour best_of"),
        ("Qwen/Qwen3-8B", {"colour": "red"}, "no model argument colour"),
        ("Qwen/Qwen3-8B", {"context_window": "many"}, "context_window is a number of tokens"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, args: Any, why: str
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    run = write_run(tmp_path / "run")
    with pytest.raises(PrerequisiteError, match=why):
        get_model(f"tinker/{name.format(run=run)}", memoize=False, **args)


def test_a_missing_key_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(PrerequisiteError, match="no TINKER_API_KEY in the environment"):
        get_model("tinker/Qwen/Qwen3-8B", memoize=False)
    with pytest.raises(PrerequisiteError, match="is not the folder of a run"):
        get_model(f"tinker/{tmp_path}", memoize=False)


def test_each_key_has_its_own_client(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr(source, "_connect", lambda _, api_key: asked.append(api_key))
    model = Source(base_model="of several keys")
    for key in ("tml-one", "tml-two", "tml-one"):
        source.connect(model, api_key=key).result()
    assert asked == ["tml-one", "tml-two"]


def test_a_local_run_needs_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "local-server").mkdir()
    monkeypatch.setitem(sys.modules, "skyrl", None)
    with pytest.raises(PrerequisiteError, match=r"not installed \(skyrl.*\[local\]"):
        get_model(f"tinker/{run}", memoize=False)


@pytest.mark.local
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "renderer", "why"),
    [
        ("tinker://m/weights/final", "qwen3", "there are no weights tinker://m/weights/final"),
        ("{model}", "deepseekv3", "renderer 'deepseekv3' cannot be used with the tokenizer"),
    ],
)
async def test_a_server_without_the_model_is_named(
    server: LocalServer, tiny_model: Path, name: str, renderer: str, why: str
) -> None:
    asked = get_model(
        f"tinker/{name.format(model=tiny_model)}",
        base_url=server.url,
        renderer=renderer,
        memoize=False,
    )
    with pytest.raises(ConfigError, match=why):
        await asked.generate("x")
