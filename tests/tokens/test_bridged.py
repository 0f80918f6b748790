"""Programs that speak a model API keep an episode in one sequence, unless they edit it."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import unicodedata
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import CompactionStrategy, CompactionSummary, ModelOutput
from inspect_ai.scorer import includes
from tests.tokens.bridged import DIALECTS, Item, Program, bridged, converse, unchanged
from tests.tokens.conversations import Rollout, assert_trained, play_out
from tests.tokens.formats import renderer

from inspect_tinker_plugin.contracts.episodes import TurnRequest
from inspect_tinker_plugin.tokens.episode import DatasetRenderer

CONTEXTS: dict[str, DatasetRenderer] = {}


async def play(
    run: Callable[[], Awaitable[None]],
    says: Callable[[TurnRequest], str | tuple[str, bool]],
    name: str = "qwen3_keep_thinking",
    compaction: CompactionStrategy | None = None,
) -> Rollout:
    """Run a program; a function decides the policy's answer to each request."""
    sample = Sample(input="Do it.", target="x", id=1)
    task = Task(dataset=[sample], solver=bridged(run, compaction=compaction), scorer=includes())
    rollout = Rollout(CONTEXTS.setdefault(name, DatasetRenderer(renderer(name))))
    outcome = await play_out(task, answering(rollout, says))
    assert outcome.error is None, outcome.error.__cause__
    return rollout


def conversing(dialect: str, turns: int, **options: Any) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        program = DIALECTS[dialect](**options)
        program.user("Do it.")
        await converse(program, turns)

    return run


def answering(
    rollout: Rollout, says: Callable[[TurnRequest], str | tuple[str, bool]]
) -> Callable[[TurnRequest], ModelOutput]:
    """Answer in tokens; a reply beside ``False`` is cut off."""

    def answer(request: TurnRequest) -> ModelOutput:
        said = says(request)
        text, ended = said if isinstance(said, tuple) else (said, True)
        reason = "stop" if ended else "length"
        return rollout.answer(request, text, stop=ended, stop_reason=reason)

    return answer


def script(texts: Sequence[str | tuple[str, bool]]) -> Callable[[TurnRequest], Any]:
    left = list(texts)
    return lambda request: left.pop(0)


def call(arguments: Any, name: str = "bash", *, indent: int | None = None) -> str:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, indent=indent)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'


LS = call({"cmd": "ls"})
CORPUS: dict[str, str | tuple[str, bool]] = {
    "text": "A plain reply.",
    "leading space": "  Two blanks before.",
    "trailing space": "A blank after. ",
    "trailing newlines": "Lines after.\n\n\n",
    "tabs around": "\tTabs\taround.\t",
    "inner space": "odd   inner\n\n\n\nspacing",
    "only space": "   \n ",
    "nothing": "",
    "no content": "(no content)",
    "lines": "- one\n- two\n\n1. three\n",
    "code": "```python\nprint('x')\n```",
    "html": "<b>bold</b> &amp; <i>x</i>",
    "json text": '{"a": [1, 2, {"b": null}]}',
    "quotes": "\"double\" 'single' \\ backslash \\n",
    "accents": "Ünïcödé, naïve, Straße",
    "emoji": "Fine 🙂👩‍👩‍👧‍👦 flags 🇩🇪",
    "two forms": "é and e\u0301",
    "right to left": "שלום عليكم",
    "cjk": "你好，世界。これはテスト",
    "odd spaces": "thin\u2009nbsp\u00a0zero\u200bwidth",
    "controls": "bell\u0007 and \u001b[31mred\u001b[0m",
    "call": LS,
    "text and call": f"I look.\n\n{LS}",
    "text and space and call": f"  I look. \n\n {LS}",
    "call and space": f"{LS}\n\n ",
    "two calls": f"{LS}\n{call({'cmd': 'cat a'})}",
    "equal calls": f"{LS}\n{LS}",
    "three calls": "\n".join(call({"cmd": f"echo {n}"}) for n in range(3)),
    "compact call": '<tool_call>\n{"name":"bash","arguments":{"cmd":"ls"}}\n</tool_call>',
    "wide call": call({"cmd": "ls", "deep": {"b": [1, 2.5, None]}}, indent=4),
    "empty arguments": call({}),
    "values": call({"z": True, "a": 1, "m": 1.0, "n": -0.0, "e": 1e30, "s": "1", "x": None}),
    "unicode call": call({"cmd": "echo 'ü 🙂'"}),
    "long argument": call({"cmd": "x" * 5000}),
    "unknown tool": call({"x": 1}, name="nonsense"),
    "malformed call": call('{"cmd": oops}'),
    "malformed and good": f"{call('{')}\n{LS}",
    "string arguments": call('"ls"'),
    "unclosed call": '<tool_call>\n{"name": "bash", "arguments": {"cmd": "ls"',
    "reasoning": "<think>\nHm, let me see.\n</think>\n\nThe answer.",
    "reasoning only": "<think>\nHm.\n</think>",
    "reasoning and call": f"<think>\nHm.\n</think>\n\n{LS}",
    "reasoning, text and call": f"<think>\n a \n\n b\n</think>\n\n Text \n{LS}",
    "empty reasoning": "<think>\n\n</think>\n\nNo thought.",
    "reasoning twice": "<think>one</think>First.<think>two</think>Second. ",
    "reasoning between": "Before. <think>inside</think> After.",
    "cut text": ("Once upon a", False),
    "cut reasoning": ("<think>\nI was thin", False),
    "cut call": ('<tool_call>\n{"name": "bash", "argu', False),
    "very long": "A long line of text, again and again. \n" * 1200,
}


def trimmed(item: Item) -> Item:
    """Store replies as a program that trims text and leaves out empty parts."""
    content = item.get("content")
    if isinstance(content, str):
        return {**item, "content": content.strip() or None}
    if isinstance(content, list):
        parts = [{**part, "text": part["text"].strip()} if "text" in part else part
                 for part in content]  # fmt: skip
        return {**item, "content": [part for part in parts if part.get("text") != ""] or parts}
    return item


def by_javascript(value: Any) -> Any:
    """Return a value as JavaScript writes it, which has one kind of number."""
    if isinstance(value, dict):
        return {name: by_javascript(item) for name, item in value.items()}
    if isinstance(value, list):
        return [*map(by_javascript, value)]
    whole = type(value) is float and value.is_integer() and abs(value) < 1e21
    return int(value) if whole else value


def reserialised(item: Item) -> Item:
    """Store replies as a program in JavaScript that parses arguments and writes them again."""
    item = copy.deepcopy(item)
    for function in [call["function"] for call in item.get("tool_calls", [])] + (
        [item] if item.get("type") == "function_call" else []
    ):
        arguments = by_javascript(json.loads(function["arguments"]))
        function["arguments"] = json.dumps(arguments, sort_keys=True, separators=(",", ":"))
    for block in item["content"] if isinstance(item.get("content"), list) else []:
        if block["type"] == "tool_use":
            block["input"] = by_javascript(dict(sorted(block["input"].items())))
    return item


HABITS = {"as it comes": unchanged, "trims": trimmed, "writes again": reserialised}


def in_turn(name: str, cases: Iterable[object]) -> pytest.MarkDecorator:
    """Run each case in each dialect; per change in one of them, which take turns."""
    return pytest.mark.parametrize(
        ("dialect", name),
        [
            pytest.param(
                dialect, case, marks=() if turn == number % len(DIALECTS) else pytest.mark.nightly
            )
            for turn, dialect in enumerate(DIALECTS)
            for number, case in enumerate(cases)
        ],
    )


def assert_exact(rollout: Rollout) -> None:
    """Check that the datums contain what the sampler was asked and said, and nothing else."""
    sampled = [(turn.ob.to_ints(), list(turn.ac.tokens)) for turn in rollout.transitions]
    assert_trained(sampled, rollout.data())


@pytest.mark.parametrize(
    ("dialect", "habit"),
    [
        pytest.param(dialect, habit, marks=() if number == place else pytest.mark.nightly)
        for number, dialect in enumerate(DIALECTS)
        for place, habit in enumerate(HABITS)
    ],
)
async def test_an_episode_of_every_reply_is_one_datum(dialect: str, habit: str) -> None:
    run = conversing(dialect, len(CORPUS), keeps=HABITS[habit])
    rollout = await play(run, script(list(CORPUS.values())))
    metrics = rollout.tokens.metrics
    assert len(rollout.data()) == metrics["tokens/segments"] == 1
    assert metrics["tokens/continued"] + metrics["tokens/continued_lossy"] == len(CORPUS) - 1
    assert metrics["tokens/continued_lossy"] > 0
    assert metrics["tokens/rerendered"] == metrics["tokens/resampled"] == 0
    assert_exact(rollout)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_library_in_the_solvers_process_is_continued(dialect: str) -> None:
    replies = [LS, f"I look.\n\n{LS}", "<think>\nHm.\n</think>\n\nSo.", "Done."]
    rollout = await play(conversing(dialect, 4, in_sandbox=False), script(replies))
    assert len(rollout.data()) == 1
    assert_exact(rollout)


@pytest.mark.nightly
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_each_reply_alone_is_continued(dialect: str) -> None:
    for name, reply in CORPUS.items():
        rollout = await play(conversing(dialect, 3), script([reply, LS, "Done."]))
        assert len(rollout.data()) == 1, name
        assert_exact(rollout)


def replaced(old: str, new: str) -> Callable[[list[Item]], list[Item]]:
    def edit(items: list[Item]) -> list[Item]:
        text = json.dumps(items, ensure_ascii=False)
        assert old in text, text
        edited: list[Item] = json.loads(text.replace(old, new, 1))
        return edited

    return edit


REPLIES = ["Reply zero.", "Reply  one.", "Reply two."]
EDITS: dict[str, Callable[[list[Item]], list[Item]]] = {
    "a word": replaced("Reply zero", "Reply null"),
    "inner white space": replaced("Reply  one", "Reply one"),
    "a reply's end": replaced("Reply zero.", "Reply zero"),
    "an addition": replaced("Reply zero.", "Reply zero. And more."),
    "a reply to no content": replaced("Reply zero.", "(no content)"),
    "the question": replaced("Do it.", "Do that."),
    "a reply dropped": lambda items: [items[0], *items[2:]],
    "a turn dropped": lambda items: [items[0], *items[3:]],
    "the first dropped": lambda items: items[1:],
    "an insertion": lambda items: [items[0], {"role": "user", "content": "P.S."}, *items[1:]],
    "a system message": lambda items: [{"role": "user", "content": "Rules."}, *items],
    "replies swapped": lambda items: [items[0], items[3], items[2], items[1], *items[4:]],
    "a reply twice": lambda items: [*items[:3], items[1], items[2], *items[3:]],
    "a role": lambda items: [items[0], {"role": "user", "content": "Reply zero."}, *items[2:]],
}


async def edited(
    dialect: str,
    replies: Sequence[str],
    edit: Callable[[list[Item]], list[Item]],
    name: str = "qwen3_keep_thinking",
) -> Rollout:
    async def run() -> None:
        program = DIALECTS[dialect]()
        program.user("Do it.")
        await converse(program, len(replies))
        program.items = edit(program.items)
        await converse(program, 2)

    return await play(run, script([*replies, "After the edit.", "End."]), name)


@in_turn("edit", EDITS)
async def test_an_edited_history_is_never_continued(dialect: str, edit: str) -> None:
    rollout = await edited(dialect, REPLIES, EDITS[edit])
    after = len(REPLIES)
    assert not rollout.continues(after, after - 1)
    assert rollout.continues(after + 1, after)
    assert len(rollout.data()) == 2
    metrics = rollout.tokens.metrics
    assert metrics["tokens/segments"] == 2
    assert metrics["tokens/rerendered"] == 1
    assert metrics["tokens/first_divergence"] == after
    assert metrics["tokens/resampled"] > 0
    assert_exact(rollout)


def blocks_of(items: list[Item]) -> list[Item]:
    nested = [
        item["content"] if isinstance(item.get("content"), list) else [item] for item in items
    ]
    return [block for blocks in nested for block in blocks]


def results_of(items: list[Item]) -> list[tuple[Item, str, str]]:
    """The results of tool calls among items, each with the names of its id and its text."""
    names = {"tool_call_id": "content", "tool_use_id": "content"}
    found = [(each, id, names[id]) for each in blocks_of(items) for id in names if id in each]
    outputs = [each for each in blocks_of(items) if each.get("type") == "function_call_output"]
    return [*found, *((each, "call_id", "output") for each in outputs)]


def calls_of(items: list[Item]) -> list[tuple[Item, str]]:
    """The tool calls among items, each with the name of the field that has its id."""
    blocks = blocks_of(items)
    return [
        *((call, "id") for block in blocks for call in block.get("tool_calls", [])),
        *((block, "id") for block in blocks if block.get("type") == "tool_use"),
        *((block, "call_id") for block in blocks if block.get("type") == "function_call"),
    ]


def swap(one: tuple[Item, str], other: tuple[Item, str]) -> None:
    (first, name), (second, name_too) = one, other
    first[name], second[name_too] = second[name_too], first[name]


def swap_results(items: list[Item]) -> None:
    (one, _, text), (other, _, _) = results_of(items)[:2]
    swap((one, text), (other, text))


def swap_result_ids(items: list[Item]) -> None:
    (one, id, _), (other, _, _) = results_of(items)[:2]
    swap((one, id), (other, id))


def swap_call_ids(items: list[Item]) -> None:
    one, other = calls_of(items)[:2]
    swap(one, other)


def reuse_a_call_id(items: list[Item]) -> None:
    """Give the second turn's call and result the ids of the first's."""
    calls, results = calls_of(items), results_of(items)
    calls[2][0][calls[2][1]] = calls[0][0][calls[0][1]]
    results[2][0][results[2][1]] = results[0][0][results[0][1]]


def rename_the_tool(items: list[Item]) -> None:
    call = calls_of(items)[0][0]
    call.get("function", call)["name"] = "dash"


def take_anothers_result(items: list[Item]) -> None:
    (one, _, text), (other, _, _) = results_of(items)[:2]
    one[text] = other[text]


def in_result(change: Callable[[str], str]) -> Callable[[list[Item]], None]:
    def edit(items: list[Item]) -> None:
        block, _, text = results_of(items)[0]
        block[text] = change(block[text])

    return edit


SUBTLE: dict[str, Callable[[list[Item]], None]] = {
    "results swapped": swap_results,
    "ids of results swapped": swap_result_ids,
    "ids of calls swapped": swap_call_ids,
    "the id of an earlier call": reuse_a_call_id,
    "a tool's name": rename_the_tool,
    "a result's case": in_result(str.upper),
    "a result's end": in_result(lambda text: text + " "),
    "a result's Unicode form": in_result(lambda text: unicodedata.normalize("NFD", text)),
    "another call's result": take_anothers_result,
}


@in_turn("edit", SUBTLE)
async def test_subtle_edits_of_calls_and_results_are_never_continued(
    dialect: str, edit: str
) -> None:
    async def run() -> None:
        program = DIALECTS[dialect]()
        program.user("Do it.")
        for turn in range(2):  # results that look alike
            for number, asked in enumerate(await program.call()):
                program.result(asked.id, f"déjà {turn}{number}")
        await program.call()
        before = copy.deepcopy(program.items)
        SUBTLE[edit](program.items)
        assert program.items != before
        program.user("And now?")
        await program.call()

    says = [f"{LS}\n{LS}", f"{LS}\n{LS}", "Done.", "After the edit."]
    rollout = await play(run, script(says))
    assert not rollout.continues(3, 2)
    assert rollout.tokens.metrics["tokens/rerendered"] == 1
    assert_exact(rollout)


FORMS: dict[str, tuple[str, Callable[[str], str]]] = {
    "NFC to NFD": ("Un café, naïve.", lambda text: unicodedata.normalize("NFD", text)),
    "NFD to NFC": ("Un cafe\u0301.", lambda text: unicodedata.normalize("NFC", text)),
    "compatible letters": ("A \ufb01nal \u2460.", lambda text: unicodedata.normalize("NFKC", text)),
    "case": ("The Answer.", lambda text: text.swapcase()),
    "quotes": ("\u201cSo\u201d.", lambda text: text.replace("\u201c", '"').replace("\u201d", '"')),
    "no width": ("One\u200btwo.", lambda text: text.replace("\u200b", "")),
    "lines": ("One\r\ntwo.", lambda text: text.replace("\r\n", "\n")),
    "an invisible end": ("The end.\u200b", lambda text: text.replace("\u200b", "")),
}


def with_texts(items: list[Item], change: Callable[[str], str]) -> list[Item]:
    """Change the texts of replies."""
    edited = copy.deepcopy(items)
    for block in blocks_of([item for item in edited if item.get("role") != "user"]):
        for name in {"text", "content"} & block.keys():
            block[name] = change(block[name])
    return edited


@in_turn("form", FORMS)
async def test_texts_that_only_look_equal_are_never_continued(dialect: str, form: str) -> None:
    text, change = FORMS[form]
    assert change(text) != text
    rollout = await edited(dialect, [text], lambda items: with_texts(items, change))
    assert not rollout.continues(1, 0)
    assert_exact(rollout)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_equal_replies_in_two_branches_are_not_confused(dialect: str) -> None:
    """A program that goes on with the one, behind a history of the other."""

    async def run() -> None:
        one, other = DIALECTS[dialect](), DIALECTS[dialect]()
        one.user("Do this.")
        other.user("Do that.")
        await converse(one, 2)
        await converse(other, 2)
        one.items[-1:], other.items[-1:] = other.items[-1:], one.items[-1:]  # equal questions
        await one.call()
        other.items[0] = one.items[0]  # now it is the other's history, with its own replies
        other.user("More?")
        await other.call()

    rollout = await play(run, lambda request: "The same words.")
    assert rollout.continues(4, 1)
    assert not rollout.continues(4, 3)
    assert not rollout.continues(5, 3)
    assert_exact(rollout)


ARGUMENTS = [
    ('{"cmd": 1}', '{"cmd": true}'),
    ('{"cmd": 0.0}', '{"cmd": false}'),
    ('{"cmd": [true]}', '{"cmd": [1.0]}'),
    ('{"cmd": 1}', '{"cmd": 1.0000000000000002}'),
    ('{"cmd": 9007199254740993}', '{"cmd": 9007199254740992}'),
    ('{"cmd": "1"}', '{"cmd": 1}'),
    ('{"cmd": null}', "{}"),
    ('{"cmd": null}', '{"cmd": false}'),
    ('{"cmd": []}', '{"cmd": {}}'),
    ('{"cmd": [1, 2]}', '{"cmd": [2, 1]}'),
    ('{"cmd": ""}', '{"cmd": null}'),
    ('{"cmd": "\u00e9"}', '{"cmd": "e\u0301"}'),
    ('{"cmd": "a"}', '{"cmd": "A"}'),
    ('{"cmd": {"a": 1}}', '{"cmd": {"b": 1}}'),
    ('{"cmd": "a", "cmd": "b"}', '{"cmd": "a"}'),
]
SAME = [
    ('{"cmd": 1}', '{"cmd": 1.0}'),
    ('{"cmd": -0.0}', '{"cmd": 0.0}'),
    ('{"cmd": 0.5}', '{"cmd": 5e-1 }'),
    ('{"cmd": "ls"}', '{"cmd": "x", "cmd": "ls"}'),
]
"""Numbers written in another way; a name twice, of which the last counts, as the API reads it."""


@in_turn("arguments", [*ARGUMENTS, *SAME])
async def test_arguments_that_only_look_equal_are_never_continued(
    dialect: str, arguments: tuple[str, str]
) -> None:
    said, sent = arguments

    def edit(items: list[Item]) -> list[Item]:
        for block, _ in calls_of(items):
            if dialect == "anthropic":
                block["input"] = json.loads(sent)
            else:
                block.get("function", block)["arguments"] = sent
        return items

    rollout = await edited(dialect, [call(said)], edit)
    assert rollout.continues(1, 0) is ((said, sent) in SAME)
    assert_exact(rollout)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_edited_reasoning_is_never_continued(dialect: str) -> None:
    thought = "<think>\nA thought.\n</think>\n\nText."
    rollout = await edited(dialect, [thought], replaced("A thought.", "Another."))
    assert not rollout.continues(1, 0)


def without_thought(items: list[Item]) -> list[Item]:
    kept = []
    for item in copy.deepcopy(items):
        content = item.get("content")
        if isinstance(content, str):
            item["content"] = content.rpartition("</think>")[2]
        elif isinstance(content, list):
            item["content"] = [p for p in content if "<think>" not in p.get("text", "")]
        if item["content"]:
            kept.append(item)
    return kept


@pytest.mark.parametrize(
    ("dialect", "continues"), [("chat", True), ("anthropic", True), ("responses", False)]
)
async def test_reasoning_may_be_lost_where_the_api_has_no_place_for_it(
    dialect: str, continues: bool
) -> None:
    rollout = await edited(dialect, ["<think>\nHm.\n</think>\n\nText."], without_thought)
    assert rollout.continues(1, 0) is continues


async def test_tags_that_are_text_are_not_lost_with_reasoning() -> None:
    text = "Write <think>your thoughts</think> first."
    rollout = await edited("chat", [text], without_thought, "qwen3_instruct")
    assert not rollout.continues(1, 0)
    rollout = await edited("chat", [text], lambda items: items, "qwen3_instruct")
    assert rollout.continues(1, 0)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_side_question_does_not_split_the_main_line(dialect: str) -> None:
    async def run() -> None:
        main = DIALECTS[dialect]()
        main.user("Do it.")
        for turn in range(3):
            await converse(main, 1)
            side = DIALECTS[dialect]()
            side.user(f"A title for turn {turn}?")
            await side.call()

    rollout = await play(run, lambda request: "Title. " if len(request.messages) == 1 else LS)
    assert len(rollout.data()) == 4
    assert_exact(rollout)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_compaction_adds_one_datum(dialect: str) -> None:
    async def run() -> None:
        program = DIALECTS[dialect]()
        program.user("Do it.")
        await converse(program, 4)
        program.items = [{"role": "user", "content": "So far: nothing."}]
        await converse(program, 4)

    rollout = await play(run, lambda request: f" {len(request.messages)} \n{LS}")
    assert len(rollout.data()) == rollout.tokens.metrics["tokens/segments"] == 2
    assert_exact(rollout)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_summary_for_the_bridge_is_made_of_what_was_sampled(dialect: str) -> None:
    """Anthropic's API has no empty text, and the policy did not say "(no content)"."""
    says = script([call({"cmd": "word " * 300}), "So far: words.", "Done."])
    summary = CompactionSummary(threshold=400, memory=False)
    rollout = await play(conversing(dialect, 2), says, compaction=summary)
    asked = str(rollout.context.tokenizer.decode(rollout.transitions[1].ob.to_ints()))
    assert "word word" in asked
    assert "(no content)" not in asked


@pytest.mark.parametrize("with_tools", [True, False])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_sub_agents_at_once_are_a_datum_each(dialect: str, with_tools: bool) -> None:
    async def run() -> None:
        agents = [DIALECTS[dialect](with_tools=with_tools) for _ in range(8)]
        for number, agent in enumerate(agents):
            agent.user("Do it." if number < 4 else f"Do {number}.")
        await asyncio.gather(*[converse(agent, 4) for agent in agents])

    # four agents ask and get the same, so that only call ids distinguish them, if there are calls
    call = LS if with_tools else ""
    rollout = await play(run, lambda request: f"Turn {len(request.messages)}. \n{call} ")
    assert len(rollout.data()) == 8
    assert rollout.tokens.metrics["tokens/segments"] == 8
    assert_exact(rollout)


def random_program(rng: random.Random, dialect: str) -> Callable[[], Awaitable[None]]:
    """Conversations that grow, branch and are edited at random, some of them at once."""

    async def run() -> None:
        programs: list[Program] = []
        for number in range(rng.randint(1, 3)):
            program = DIALECTS[dialect](keeps=rng.choice(list(HABITS.values())))
            program.user(f"Task {rng.choice([0, number])}.")
            programs.append(program)
        for _ in range(rng.randint(3, 8)):
            if rng.random() < 0.2:
                other = copy.copy(rng.choice(programs))
                other.items = copy.deepcopy(other.items)
                programs.append(other)
            chosen = rng.sample(programs, rng.randint(1, min(3, len(programs))))
            await asyncio.gather(*[converse(program, 1) for program in chosen])

    return run


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("seed", range(3))
async def test_whatever_a_program_does_the_datums_are_exact(dialect: str, seed: int) -> None:
    rng = random.Random(seed)
    replies = [reply for reply in CORPUS.values() if len(str(reply)) < 200]
    rollout = await play(random_program(rng, dialect), lambda request: rng.choice(replies))
    assert_exact(rollout)
    metrics = rollout.tokens.metrics
    data = rollout.data()
    assert metrics["tokens/segments"] == len(data)
    assert metrics["tokens/trained"] == sum(datum.model_input.length + 1 for datum in data)
    assert metrics["tokens/rerendered"] == metrics["tokens/resampled"] == 0
