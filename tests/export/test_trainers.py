"""Exports given to the code that trains on them, as it is released.

The cookbook is always there. TRL, verl and verifiers are not dependencies; with
``make trainers`` their releases are put into a folder of their own and these tests run.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessage, ChatMessageAssistant, ChatMessageUser, ModelOutput
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from tests.export.logged_runs import (
    add,
    agent,
    as_said,
    evaluated,
    loaded,
    run_export,
    sums,
)
from tests.rl.policies import TOKENIZER, renderer, tokenizer
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

from inspect_tinker_plugin.contracts.episodes import TurnRequest
from inspect_tinker_plugin.contracts.errors import ConfigError, ExportError
from inspect_tinker_plugin.export.options import LAYOUTS, Choice, ExportOptions, Form, Layout
from inspect_tinker_plugin.export.pipeline import export_task
from inspect_tinker_plugin.tasks.reference import ResolvedTask
from inspect_tinker_plugin.testing.replies import call, say
from inspect_tinker_plugin.train.imitation import ComparisonsBuilder, DemonstrationsBuilder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs of conversations without tools, with an example that is not the model's."""
    folder = tmp_path_factory.mktemp("plain")
    shots: list[ChatMessage] = [
        ChatMessageUser(content="Say a number."),
        ChatMessageAssistant(content="7"),
        ChatMessageUser(content="Say another."),
    ]
    said = iter(["1 yes", "0 no", "0 never", "1 sure"])
    task = Task(
        name="plain",
        dataset=[Sample(id=n, input=list(shots), target="1") for n in (1, 2)],
        scorer=as_said(),
        epochs=2,
    )
    evaluated(task, lambda request: next(said), folder, max_samples=1)
    return folder


@pytest.fixture(scope="module")
def simple(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs of one-turn conversations."""
    folder = tmp_path_factory.mktemp("simple")
    said = iter(["1 yes", "0 no", "0 sure", "1 never"])
    evaluated(
        sums(2, scorer=as_said(), epochs=2), lambda request: next(said), folder, max_samples=1
    )
    return folder


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs of an agent with tools, that is right in half of its runs."""
    folder = tmp_path_factory.mktemp("tooled")
    wrong = iter([False, False, True, True])

    def script(request: TurnRequest) -> ModelOutput:
        last = request.messages[-1]
        if last.role != "tool":
            return say("I add.", call("add", a=int(last.text.partition(" ")[0]), b=2))
        return say("", call("submit", answer="0" if next(wrong) else last.text))

    evaluated(agent(2), script, folder, epochs=2, max_samples=1)
    return folder


def config(**changes: Any) -> ChatDatasetBuilderCommonConfig:
    given = {
        "model_name_for_tokenizer": str(TOKENIZER),
        "renderer_name": "qwen3_instruct",
        "max_length": None,
        "batch_size": 2,
    }
    return ChatDatasetBuilderCommonConfig(**{**given, **changes})


def trained_text(datum: Any) -> str:
    targets = datum.loss_fn_inputs["target_tokens"].data
    weights = datum.loss_fn_inputs["weights"].data
    return str(tokenizer().decode([t for t, w in zip(targets, weights, strict=True) if w > 0]))


# the cookbook


def test_the_cookbook_trains_on_the_marked_words_of_a_file(plain: Path, tmp_path: Path) -> None:
    run_export(plain, tmp_path / "out", layout="tinker", format="jsonl")
    (file,) = (tmp_path / "out").glob("*.jsonl")
    builder = FromConversationFileBuilder(
        file_path=str(file), common_config=config(train_on_what=TrainOnWhat.CUSTOMIZED)
    )
    train, _ = builder()
    texts = {trained_text(datum) for index in range(len(train)) for datum in train.get_batch(index)}
    assert texts == {f"{said}<|im_end|>" for said in ("1 yes", "0 no", "1 sure", "0 never")}


@pytest.mark.parametrize("layout", ["chat", "tinker"])
def test_the_cookbook_imitates_an_agent_with_its_tools(
    layout: Layout, tooled: Path, tmp_path: Path
) -> None:
    run_export(tooled, tmp_path / "out", Choice(form="rejection"), layout=layout)
    builder = DemonstrationsBuilder(path=str(tmp_path / "out"), common_config=config())
    train, _ = builder()
    (first, _) = train.get_batch(0)
    assert trained_text(first) == (
        'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
        "<|im_end|>"
        '<tool_call>\n{"name": "submit", "arguments": {"answer": "3"}}\n</tool_call><|im_end|>'
    )
    prompt = str(tokenizer().decode(first.model_input.to_ints()))
    assert '"name": "add"' in prompt.partition("<|im_end|>")[0]


@pytest.mark.parametrize("layout", ["chat", "tinker"])
def test_the_cookbook_imitates_the_end_of_an_empty_reply(layout: Layout, tmp_path: Path) -> None:
    evaluated(sums(2), lambda request: say(""), tmp_path / "logs")
    run_export(tmp_path / "logs", tmp_path / "out", layout=layout)
    train, _ = DemonstrationsBuilder(path=str(tmp_path / "out"), common_config=config())()
    assert [trained_text(datum) for datum in train.get_batch(0)] == ["<|im_end|>"] * 2


def test_the_cookbook_compares_the_pairs_of_a_file(plain: Path, tmp_path: Path) -> None:
    run_export(plain, tmp_path / "out", Choice(form="preference"), layout="tinker", format="jsonl")
    (file,) = (tmp_path / "out").glob("*.jsonl")
    builder = DPODatasetBuilderFromComparisons(
        comparison_builder=ComparisonBuilderFromJsonl(train_path=str(file)), common_config=config()
    )
    train, _ = builder()
    texts = [trained_text(datum) for datum in train.get_batch(0)]
    assert len(texts) == 4
    assert all(text.startswith("1") for text in texts[::2])
    assert all(text.startswith("0") for text in texts[1::2])


@pytest.mark.parametrize("layout", ["chat", "tinker"])
def test_the_cookbook_compares_agents(layout: Layout, tooled: Path, tmp_path: Path) -> None:
    run_export(tooled, tmp_path / "out", Choice(form="preference"), layout=layout)
    comparisons = ComparisonsBuilder(path=str(tmp_path / "out"), renderer=renderer())
    builder = DPODatasetBuilderFromComparisons(
        comparison_builder=comparisons, common_config=config()
    )
    train, _ = builder()
    better, worse = [trained_text(datum) for datum in train.get_batch(0)][:2]
    assert '"answer": "0"' in worse
    assert '"answer": "0"' not in better


def test_an_export_of_prompts_is_no_demonstration(simple: Path, tmp_path: Path) -> None:
    run_export(simple, tmp_path / "out", Choice(form="preference"))
    builder = DemonstrationsBuilder(path=str(tmp_path / "out"), common_config=config())
    with pytest.raises(ConfigError, match="it has no column 'messages'"):
        builder()


# what no trainer reads


@pytest.mark.parametrize(
    ("form", "layout"),
    [
        ("preference", "verl"),
        ("rewards", "verl"),
        ("sft", "verifiers"),
        ("rejection", "verifiers"),
        ("preference", "verifiers"),
    ],
)
def test_a_form_that_a_trainer_does_not_read_is_refused(
    form: Form, layout: Layout, simple: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"nothing in {layout} that reads --as {form}"):
        run_export(simple, tmp_path / "out", Choice(form=form), layout=layout)


def test_verl_is_not_given_what_it_would_read_otherwise(
    plain: Path, tooled: Path, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match="verl trains on every assistant message"):
        run_export(plain, tmp_path / "out", layout="verl")
    with pytest.raises(ExportError, match="verl reads tools as Arrow structs"):
        run_export(tooled, tmp_path / "out", layout="verl")


@pytest.mark.parametrize("form", ["sft", "preference"])
def test_trl_is_not_given_integers_that_its_columns_cannot_hold(form: Form, tmp_path: Path) -> None:
    def adds(request: TurnRequest) -> Any:
        question, last = request.messages[0].text, request.messages[-1]
        if last.role == "tool":
            return say(str(next(scores)))
        return say("", call("add", a=int(question.partition(" ")[0]), b=2**64 - 1))

    scores = iter([1, 1, 0, 0])
    samples = [Sample(id=n, input=f"{n} + 1") for n in (2, 2**64)]
    task = Task(dataset=samples, solver=[use_tools(add()), generate()], scorer=as_said(), epochs=2)
    evaluated(task, adds, tmp_path / "logs", max_samples=1)
    report = run_export(tmp_path / "logs", tmp_path / "out", Choice(form=form), layout="trl")
    assert {failure.id.partition(" ")[0] for failure in report.failures} == {str(2**64)}
    assert all("integers of 64 bits" in failure.reason for failure in report.failures)
    said = loaded(tmp_path / "out")[0]["completion" if form == "sft" else "chosen"]
    assert said[0]["tool_calls"][0]["function"]["arguments"] == {"a": 2, "b": 2**64 - 1}


# TRL


def qwen() -> Any:
    """The shipped tokenizer with a chat template of Qwen's form that marks what is generated."""
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(str(TOKENIZER))
    made.chat_template = (
        "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{%- endif %}"
        "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{%- for c in m.tool_calls or [] %}{{ '<tool_call>' }}"
        "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"
        "{{ '</tool_call>' }}{%- endfor %}{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
        "{%- else %}{{ m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
    )
    return made


def labelled(tok: Any, row: dict[str, Any]) -> str:
    shown = [token for token in row["labels"] if token != -100]
    return str(tok.decode(shown))


def prepared(trainer: Any, data: Any, tok: Any, args: Any, **further: Any) -> list[dict[str, Any]]:
    """What TRL makes of a dataset, by the method that its trainers do it with."""
    rows = trainer._prepare_dataset(data, tok, args, **further, dataset_name="train")
    found: list[dict[str, Any]] = rows.to_list()
    return found


def imitated(folder: Path) -> tuple[Any, list[dict[str, Any]]]:
    """What TRL makes of an export to imitate, with the tokenizer."""
    trl = pytest.importorskip("trl")
    tok = qwen()
    trainer = trl.SFTTrainer.__new__(trl.SFTTrainer)  # its model is not needed to read data
    trainer._tokenizer = trainer.processing_class = tok
    trainer.chat_template = None
    trainer.completion_only_loss = True
    trainer.padding_free = False
    args = trl.SFTConfig(
        output_dir="unused", assistant_only_loss=True, report_to=[], use_cpu=True, bf16=False
    )
    data = datasets.load_dataset(str(folder), split="train")
    return tok, prepared(trainer, data, tok, args, packing=False, formatting_func=None)


def test_trl_imitates_the_words_of_the_model_alone(tooled: Path, tmp_path: Path) -> None:
    run_export(tooled, tmp_path / "out", Choice(form="rejection"), layout="trl")
    tok, rows = imitated(tmp_path / "out")
    assert labelled(tok, rows[0]) == (
        'I add.<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><|im_end|>'
        '<tool_call>{"name": "submit", "arguments": {"answer": "3"}}</tool_call><|im_end|>'
    )


def test_trl_does_not_imitate_examples(plain: Path, tmp_path: Path) -> None:
    run_export(plain, tmp_path / "out", layout="trl")
    tok, rows = imitated(tmp_path / "out")
    assert labelled(tok, rows[0]) == "1 yes<|im_end|>"
    assert "7<|im_end|>" in tok.decode(rows[0]["input_ids"])


def test_trl_prefers_the_better_run(tooled: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    tok = qwen()
    trainer = trl.DPOTrainer.__new__(trl.DPOTrainer)
    trainer._tokenizer = tok
    run_export(tooled, tmp_path / "out", Choice(form="preference"), layout="trl")
    data = datasets.load_dataset(str(tmp_path / "out"), split="train")
    args = trl.DPOConfig(output_dir="unused", report_to=[], use_cpu=True, bf16=False)
    (row, *_) = prepared(trainer, data, tok, args)
    assert '"answer": "3"' in tok.decode(row["chosen_ids"])
    assert '"answer": "0"' in tok.decode(row["rejected_ids"])
    assert '"name": "add"' in tok.decode(row["prompt_ids"])


def test_trl_reads_runs_with_labels(simple: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    tok = qwen()
    trainer = trl.KTOTrainer.__new__(trl.KTOTrainer)
    trainer._tokenizer = tok
    trainer.calculate_KL = False
    run_export(simple, tmp_path / "out", Choice(form="rewards"), layout="trl")
    data = datasets.load_dataset(str(tmp_path / "out"), split="train")
    args = trl.KTOConfig(output_dir="unused", report_to=[], use_cpu=True, bf16=False)
    rows = prepared(trainer, data, tok, args)
    said = [(tok.decode(row["completion_ids"]).strip(), row["label"]) for row in rows]
    assert ("1 yes<|im_end|>", True) in said
    assert ("0 no<|im_end|>", False) in said


# verl


def test_verl_imitates_conversations(simple: Path, tmp_path: Path) -> None:
    module = pytest.importorskip("verl.utils.dataset.multiturn_sft_dataset")
    run_export(simple, tmp_path / "out", layout="verl")
    (file,) = (tmp_path / "out").glob("*.parquet")
    tok = qwen()
    data = module.MultiTurnSFTDataset(
        str(file), tok, {"pad_mode": "no_padding", "max_length": 256, "truncation": "error"}
    )
    row = data[0]
    assert len(data) == 4
    assert "1 yes" in tok.decode(row["input_ids"][row["loss_mask"].bool()])


async def test_verl_reads_prompts_with_what_its_rewards_need(tmp_path: Path) -> None:
    module = pytest.importorskip("verl.utils.dataset.rl_dataset")
    resolved = ResolvedTask(sums(3, scorer=includes()), None)
    await export_task(resolved, tmp_path / "out", ExportOptions(layout="verl"))
    (file,) = (tmp_path / "out").glob("*.parquet")
    given = {"cache_dir": str(tmp_path / "c"), "filter_overlong_prompts_workers": 1}
    row = module.RLHFDataset(str(file), qwen(), given)[1]
    assert row["data_source"] == "sums"
    assert row["reward_model"] == {"style": "rule", "ground_truth": "4"}
    assert row["raw_prompt"] == [{"role": "user", "content": "2 + 2"}]
    assert row["index"] == 1


# verifiers: the package itself does not import without Prime's services; its message types do


def verifiers_messages() -> Any:
    from pydantic import TypeAdapter

    folder = next(
        (Path(p) / "verifiers" for p in sys.path if (Path(p) / "verifiers").is_dir()), None
    )
    if folder is None:
        pytest.skip("verifiers is not there (make trainers)")
    spec = importlib.util.spec_from_file_location("verifiers_types", folder / "v1" / "types.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["verifiers_types"] = module
    spec.loader.exec_module(module)
    return TypeAdapter(module.Messages)


def test_verifiers_reads_runs_with_their_rewards(tooled: Path, tmp_path: Path) -> None:
    run_export(tooled, tmp_path / "out", Choice(form="rewards"), layout="verifiers")
    row = loaded(tmp_path / "out")[0]
    assert row["answer"] == "3"
    assert row["reward"] in (0.0, 1.0)
    messages = verifiers_messages()
    prompt = messages.validate_python(row["prompt"])
    completion = messages.validate_python(row["completion"])
    assert [m.role for m in prompt] == ["system", "user"]
    assert [m.role for m in completion] == ["assistant", "tool", "assistant"]
    assert json.loads(completion[0].tool_calls[0].arguments) == {"a": 1, "b": 2}


async def test_verifiers_reads_prompts(tmp_path: Path) -> None:
    resolved = ResolvedTask(sums(1, scorer=includes()), None)
    await export_task(resolved, tmp_path / "out", ExportOptions(layout="verifiers"))
    row = loaded(tmp_path / "out")[0]
    assert verifiers_messages().validate_python(row["prompt"])[0].content == "1 + 2"


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_prompts_have_the_same_rows_in_every_layout(layout: Layout, tmp_path: Path) -> None:
    resolved = ResolvedTask(sums(2, scorer=includes()), None)
    await export_task(resolved, tmp_path / "out", ExportOptions(layout=layout))
    rows = loaded(tmp_path / "out")
    assert [row["prompt"][0]["content"] for row in rows] == ["1 + 2", "2 + 2"]
