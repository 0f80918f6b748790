"""Sampled text becomes the same message that a solver would get in an eval."""

from __future__ import annotations

import json
from typing import Any

import pytest
from inspect_ai.model import (
    ChatMessage,
    ChatMessageTool,
    ChatMessageUser,
    ContentReasoning,
    ContentText,
    ModelOutput,
    execute_tools,
)
from inspect_ai.tool import ToolCall, ToolCallError, ToolInfo
from tests.tokens.conversations import BASH, Rollout, bash, opening, tool_results
from tests.tokens.formats import renderer, tokenizer
from tinker_cookbook.renderers import get_renderer

from inspect_tinker_plugin.tokens.episode import DatasetRenderer
from inspect_tinker_plugin.tokens.messages import renderer_message

CALLING = {
    "qwen3_instruct": '<tool_call>\n{"name": "bash", "arguments": {"cmd": VALUE}}\n</tool_call>',
    "qwen3_5": "<tool_call>\n<function=bash>\n<parameter=cmd>\nVALUE\n</parameter>\n"
    "</function>\n</tool_call>",
    "deepseekv3": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>bash<｜tool▁sep｜>{"cmd": VALUE}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
}
"""A call in the format of each renderer."""

LS = CALLING["qwen3_instruct"].replace("VALUE", '"ls"')

KIMI = [f"<|tool_call{name}|>" for name in ("_begin", "_argument_begin", "_end")]
KIMI += [f"<|tool_calls_section_{end}|>" for end in ("begin", "end")]
KIMI_CALL = '{3}{0}functions.bash:0{1}{{"cmd": "ls"}}{2}{4}'.format(*KIMI)

HARMONY = [f"<|{name}|>" for name in ("start", "end", "channel", "message", "call", "return")]


def sampled(text: str, *, name: str = "qwen3_instruct", **options: Any) -> ModelOutput:
    rollout = Rollout(DatasetRenderer(renderer(name)), tools=options.pop("tools", [BASH]))
    return rollout.turn(opening()[1:], text, **options)


def only_call(output: ModelOutput) -> ToolCall:
    (call,) = output.message.tool_calls or []
    return call


async def answered(output: ModelOutput) -> ChatMessageTool:
    """Return what Inspect tells the model about its call."""
    result = await execute_tools([output.message], [bash()])
    (message,) = result.messages
    assert isinstance(message, ChatMessageTool)
    return message


async def complaint(output: ModelOutput) -> ToolCallError:
    """Return the error that Inspect tells the model about its call."""
    message = await answered(output)
    assert message.error is not None
    return message.error


@pytest.mark.parametrize(
    ("text", "tools"),
    [
        ("  Two\n\nlines. ", [BASH]),
        ("", [BASH]),
        (f"My tool call is{' ' * 5000}<b>late</b>.", [BASH]),
        ('Say <tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>', []),
    ],
    ids=["lines", "nothing", "long blanks", "a call without tools on offer"],
)
def test_text_is_kept_as_it_is(text: str, tools: list[ToolInfo]) -> None:
    output = sampled(text, tools=tools)
    assert (output.message.content, output.message.tool_calls) == (text, None)
    assert (output.stop_reason, output.message.source) == ("stop", "generate")


def test_a_call_has_name_arguments_and_an_id() -> None:
    output = sampled('Look.\n\n<tool_call>\n{"name":"bash","arguments":{"cmd":"ls"}}\n</tool_call>')
    call = only_call(output)
    assert (call.function, call.arguments, call.parse_error) == ("bash", {"cmd": "ls"}, None)
    assert call.id
    assert output.message.content == "Look."
    assert output.stop_reason == "tool_calls"


def test_several_calls_have_ids_of_their_own() -> None:
    calls = sampled(f"{LS}\n{LS}").message.tool_calls or []
    assert len({call.id for call in calls}) == 2


async def test_arguments_that_are_no_json_are_answered_as_in_an_eval() -> None:
    output = sampled('<tool_call>\n{"name": "bash", "arguments": {"cmd": "ls}}\n</tool_call>')
    call = only_call(output)
    assert (call.function, call.arguments) == ("bash", {})
    assert output.stop_reason == "tool_calls"
    error = await complaint(output)
    assert error.type == "parsing"
    assert error.message.startswith(
        'Error parsing the following tool call arguments:\n\n{"cmd": "ls}\n\nError details: '
    )


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("<tool_call>\nnonsense\n</tool_call>", "unknown"),
        ('<tool_call>\n["bash"]\n</tool_call>', "unknown"),
        ('<tool_call>\n{"arguments": {"cmd": "ls"}}\n</tool_call>', "unknown"),
        ('<tool_call>\n{"name": "bash", "arguments": {"cmd": "ls"}\n</tool_call>', "bash"),
        ('<tool_call>\n{"name": "bash", "arguments": {"cmd": "ls"}}', "bash"),
    ],
    ids=["nonsense", "no-object", "no-name", "missing-brace", "never-closed"],
)
async def test_a_call_that_does_not_parse_has_a_parse_error(text: str, function: str) -> None:
    output = sampled(f"I try.\n{text}")
    call = only_call(output)
    assert call.function == function
    assert call.parse_error
    assert output.message.content == "I try."
    assert (await complaint(output)).type == "parsing"


@pytest.mark.parametrize(
    ("name", "call", "times", "failed"),
    [
        ("kimi_k2", KIMI_CALL, 1, [False]),
        ("kimi_k2", KIMI_CALL, 2, [False, True]),
        ("kimi_k2", KIMI_CALL.replace(":0", ""), 1, [True]),
        ("deepseekv3", CALLING["deepseekv3"].replace("VALUE", '"ls"'), 2, [False, True]),
        ("deepseekv3", CALLING["deepseekv3"].replace("bash", ""), 1, [True]),
    ],
    ids=["one", "two sections", "no number", "two sections of DeepSeek", "no name"],
)
def test_a_call_that_its_renderer_passes_over_has_a_parse_error(
    name: str, call: str, times: int, failed: list[bool]
) -> None:
    own = get_renderer(name, tokenizer(*KIMI)) if name == "kimi_k2" else renderer(name)
    rollout = Rollout(DatasetRenderer(own), tools=[BASH])
    output = rollout.turn(opening()[1:], f"I try.{call * times}")
    assert [bool(each.parse_error) for each in output.message.tool_calls or []] == failed
    assert output.message.content == "I try."


@pytest.mark.parametrize(
    "arguments", ['"ls"', '"{\\"cmd\\": \\"ls\\"}"'], ids=["bare-string", "json-in-a-string"]
)
async def test_arguments_that_fit_are_taken_as_inspect_takes_them(arguments: str) -> None:
    call = f'{{"name": "bash", "arguments": {arguments}}}'
    output = sampled(f"<tool_call>\n{call}\n</tool_call>")
    assert only_call(output).arguments == {"cmd": "ls"}
    assert (await answered(output)).text == "ran ls"


async def test_a_call_without_arguments_leaves_the_complaint_to_inspect() -> None:
    output = sampled('<tool_call>\n{"name": "bash"}\n</tool_call>')
    assert only_call(output).parse_error is None
    error = await complaint(output)
    assert "validation errors parsing tool input arguments" in error.message


@pytest.mark.parametrize("name", CALLING)
@pytest.mark.parametrize(
    "value",
    ["9" * 6000, "[" * 100_000, "[" * 3000 + "]" * 3000, '{"x":' * 3000 + "1" + "}" * 3000],
    ids=["digits", "open lists", "lists", "objects"],
)
async def test_what_pythons_json_reader_gives_up_on_is_a_call_unparsed(
    value: str, name: str
) -> None:
    """Not an error of the episode, which a policy could bring about at will."""
    text = CALLING[name].replace("VALUE", value)
    output = sampled(f"Look.\n\n{text}", name=name)
    call = only_call(output)
    if call.parse_error is None:  # a format whose values are plain text
        assert call.arguments == {"cmd": value}
        return
    assert call.function in ("bash", "unknown")
    await complaint(output)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_instruct", '<tool_call>{"name": "bash", "arguments": oops BLANKS oops</tool_call>'),
        (
            "qwen3_5",
            "<tool_call>\n<function=bash>\n<parameter=cmd>BLANKS oops</function>\n</tool_call>",
        ),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>bash:0"
            "<|tool_call_argument_begin|>BLANKS oops<|tool_calls_section_end|>",
        ),
    ],
)
def test_a_malformed_call_with_long_blanks_does_not_hold_up_the_others(
    name: str, text: str
) -> None:
    """A few hundred tokens of blanks would hold the event loop up for hours."""
    output = sampled(text.replace("BLANKS", "\n" * 500_000), name=name)
    assert only_call(output).parse_error is not None


@pytest.mark.parametrize(
    "value", ["42", "4.20", "true", '{"a":  [1]}', "two words", '"</think>"', "    indented\n"]
)
@pytest.mark.parametrize("name", ["qwen3_5", "nemotron3", "glm5_3"])
def test_a_string_is_the_text_that_was_sampled(name: str, value: str) -> None:
    """These formats have no quotes; their renderers read JSON where they can, and strip texts."""
    said = CALLING["qwen3_5"]
    if name == "glm5_3":
        said = "<tool_call>bash<arg_key>cmd</arg_key><arg_value>VALUE</arg_value></tool_call>"
    text = "</think>" + said.replace("VALUE", value)
    drafted = said.replace("VALUE", f"\n\n{value.strip()}  ")
    for reply in (text, drafted + text):
        assert only_call(sampled(reply, name=name)).arguments == {"cmd": value}
    number = BASH.model_copy(deep=True)
    number.parameters.properties["cmd"].type = "number"
    if value[:3] not in ("two", "   "):
        (as_json,) = only_call(sampled(text, name=name, tools=[number])).arguments.values()
        assert as_json == json.loads(value)


@pytest.mark.parametrize(("kind", "meant"), [("boolean", True), ("string", "True")])
def test_a_boolean_may_be_written_as_templates_do(kind: Any, meant: object) -> None:
    switch = BASH.model_copy(deep=True)
    switch.parameters.properties["cmd"].type = kind
    text = "</think>" + CALLING["qwen3_5"].replace("VALUE", "True")
    assert only_call(sampled(text, name="qwen3_5", tools=[switch])).arguments == {"cmd": meant}
    quoted = CALLING["qwen3_instruct"].replace("VALUE", '"True"')
    assert only_call(sampled(quoted, tools=[switch])).arguments == {"cmd": "True"}


@pytest.mark.parametrize("calls", [0, 1])
@pytest.mark.parametrize("blank", ["", " \n"])
def test_a_reply_of_gpt_oss_without_text_or_reasoning_is_empty(calls: int, blank: str) -> None:
    """Its renderer returns all of such a reply, control tokens too, as the text."""
    gpt_oss = get_renderer("gpt_oss_low_reasoning", tokenizer(*HARMONY))
    rollout = Rollout(DatasetRenderer(gpt_oss), tools=[BASH])
    messages: list[ChatMessage] = opening()
    said = f"<|channel|>final<|message|>{blank}"
    if calls:
        before = f"<|channel|>commentary<|message|>{blank}<|end|><|start|>assistant"
        call = ' to=functions.bash<|channel|>commentary json<|message|>{"cmd": "ls"}'
        said = before * len(blank) + call
    output = rollout.turn(messages, said)
    assert output.message.text.strip() == ""
    assert len(output.message.tool_calls or []) == calls
    rollout.turn([*messages, output.message, *tool_results(output, "b")], "Done.")
    shown = str(gpt_oss.tokenizer.decode(rollout.transitions[1].ob.to_ints()))
    assert shown.count("<|channel|>final") == 1 - calls
    assert "<|message|><|channel|>" not in shown


@pytest.mark.parametrize(
    "where", ['{"cmd": "a\\ud83db"}', '{"c\\ud83d": 1}', '{"cmd": ["\\udfff"]}']
)
def test_half_surrogate_pairs_are_spelt_out(where: str) -> None:
    """No shell, file, tokenizer or log could take them; JSON can name them."""
    call = only_call(sampled(f'<tool_call>{{"name": "bash", "arguments": {where}}}</tool_call>'))
    assert json.dumps(call.arguments).replace("\\\\", "\\") == where


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_half_surrogate_pairs_can_be_rendered_again(name: str) -> None:
    """Renderers that strip reasoning write the call again, some of them value by value."""
    rollout = Rollout(DatasetRenderer(renderer(name)), tools=[BASH])
    messages: list[ChatMessage] = opening()
    said = (
        '<tool_call>{"name": "bash", "arguments": {"cmd": "a\\ud83db", "\\ud83d": 1}}</tool_call>'
    )
    output = rollout.turn(messages, said)
    rollout.turn([*messages, output.message, *tool_results(output, "b")], "Done.")
    shown = tokenizer().decode(rollout.transitions[1].ob.to_ints())
    assert "a\\ud83db" in shown.replace("\\\\", "\\")


@pytest.mark.parametrize("name", ["qwen3", "qwen3_disable_thinking", "qwen3_5"])
@pytest.mark.parametrize("calls", [1, 2])
def test_a_call_that_is_rendered_again_gains_no_line_break(name: str, calls: int) -> None:
    context = DatasetRenderer(renderer(name))
    said = "\n".join(["I look.", *[LS] * calls])
    shown = []
    for _ in range(2):
        rollout = Rollout(context, tools=[BASH])
        messages: list[ChatMessage] = opening()
        output = rollout.turn(messages, said)
        rollout.turn([*messages, output.message, *tool_results(output, "b")], "Done.")
        prompt = str(tokenizer().decode(rollout.transitions[1].ob.to_ints()))
        shown.append(prompt.partition("I look.")[2].partition("<|im_end|>")[0])
        said = "I look." + shown[-1]
    assert shown[0] == shown[1]
    assert len(shown[0].partition("<tool_call>")[0]) in (1, 2)


def test_a_call_that_did_not_parse_is_still_what_the_model_wrote() -> None:
    bad = '<tool_call>\n{"name": "bash", "arguments": oops}\n</tool_call>'
    rollout = Rollout(DatasetRenderer(renderer("qwen3")), tools=[BASH])
    messages: list[ChatMessage] = opening()
    output = rollout.turn(messages, f"I try.\n{bad}")
    messages += [output.message, ChatMessageUser(content="Again.")]
    rollout.turn(messages, "Done.")
    assert bad in tokenizer().decode(rollout.transitions[1].ob.to_ints())


@pytest.mark.parametrize("name", ["qwen3", "qwen3_keep_thinking", "qwen3_instruct"])
def test_reasoning_is_apart_from_the_answer(name: str) -> None:
    output = sampled("<think>\nIt adds.\n</think>\n\nYes.", name=name)
    assert not isinstance(output.message.content, str)
    reasoning, text = output.message.content
    assert isinstance(reasoning, ContentReasoning)
    assert isinstance(text, ContentText)
    assert reasoning.reasoning.strip() == "It adds."
    assert text.text == "Yes."
    assert output.completion == "Yes."


def test_reasoning_and_a_call_leave_no_empty_text() -> None:
    output = sampled(f"<think>\nHm.\n</think>\n\n{LS}", name="qwen3")
    assert not isinstance(output.message.content, str)
    (reasoning,) = output.message.content
    assert isinstance(reasoning, ContentReasoning)
    assert only_call(output).arguments == {"cmd": "ls"}


@pytest.mark.parametrize(
    ("name", "opening"), [("qwen3", "<think>\n"), ("glm5_3", ""), ("deepseekv4_1_keep", "")]
)
def test_reasoning_cut_at_the_limit_is_no_answer(name: str, opening: str) -> None:
    """Whether the policy or the prompt opened it."""
    text = f"{opening}The answer is 42"
    output = sampled(text, name=name, stop=False, stop_reason="length", tools=[])
    assert (output.completion, output.stop_reason) == ("", "max_tokens")
    assert not isinstance(output.message.content, str)
    (reasoning,) = output.message.content
    assert isinstance(reasoning, ContentReasoning)
    assert reasoning.reasoning == "The answer is 42"


CUT = ["qwen3_5", "qwen3_5_preserve_thinking", "glm5_3", "deepseekv4_1_keep"]
"""Renderers whose prompts open a block of reasoning."""


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("thought", ["", "Hm."])
def test_an_answer_cut_behind_reasoning_that_the_prompt_opened_is_text(
    name: str, thought: str
) -> None:
    text = f"{thought}\n</think>\n\nIt is"
    output = sampled(text, name=name, stop=False, stop_reason="length", tools=[])
    assert output.completion == "It is"


@pytest.mark.parametrize("name", CUT)
def test_reasoning_that_was_cut_is_rendered_again_as_reasoning(name: str) -> None:
    rollout = Rollout(DatasetRenderer(renderer(name)))
    asked = opening()[1:]
    output = rollout.turn(asked, "The answer is", stop=False, stop_reason="length")
    edited = [ChatMessageUser(content="Another question.")]
    following = [ChatMessageUser(content="And?")]
    rollout.turn([*edited, output.message, *following], "x")
    message = renderer_message(output.message, images=False, call_ids={})
    said = [{"role": "user", "content": each.text} for each in (*edited, *following)]
    whole = renderer(name).build_generation_prompt([said[0], message, said[1]])  # type: ignore[list-item]  # plain dicts
    assert rollout.transitions[1].ob.to_ints() == whole.to_ints()


@pytest.mark.parametrize("name", ["llama3", "role_colon"])
@pytest.mark.parametrize("text", ["<think>Hm", "<think>Hm</think>It is"])
def test_a_cut_reply_is_text_in_a_format_without_reasoning(name: str, text: str) -> None:
    rollout = Rollout(DatasetRenderer(renderer(name)))
    output = rollout.turn(opening()[1:], text, stop=False, stop_reason="length")
    assert output.message.content == text
    changed = ChatMessageUser(content="Another question.")
    rollout.turn([changed, output.message, ChatMessageUser(content="And?")], "x")


def test_an_answer_cut_at_the_limit_keeps_its_reasoning_apart() -> None:
    text = "<think>\nHm.\n</think>\n\nIt is"
    output = sampled(text, name="qwen3", stop=False, stop_reason="length")
    assert (output.completion, output.stop_reason) == ("It is", "max_tokens")


def test_a_call_cut_at_the_limit_has_a_parse_error() -> None:
    text = 'I look.\n<tool_call>\n{"name": "bash", "argu'
    output = sampled(text, stop=False, stop_reason="length")
    assert output.stop_reason == "max_tokens"
    assert only_call(output).parse_error
    assert output.message.content == "I look."
