"""Prompts continue each other to the token, and metrics say so where they do not."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
from inspect_ai.model import (
    ChatMessage,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    GenerateConfig,
    ModelOutput,
)
from inspect_ai.tool import ToolFunction
from tests.rl.policies import trained_tokens
from tests.tokens.conversations import (
    BASH,
    SUBMIT,
    Rollout,
    call_after_text,
    compact_call,
    opening,
    request,
    tool_results,
    words,
)
from tests.tokens.formats import FORMATS, WITHOUT_TOOLS, renderer, tokenizer
from tinker_cookbook.renderers import Message
from tinker_cookbook.renderers import RenderContext as MessagePosition
from tinker_cookbook.renderers.base import RenderedMessage
from tinker_cookbook.renderers.qwen3 import Qwen3InstructRenderer
from tinker_cookbook.renderers.role_colon import RoleColonRenderer

from inspect_tinker_plugin.contracts.errors import Cause, EpisodeError
from inspect_tinker_plugin.tokens.episode import DatasetRenderer, EpisodeTokens
from inspect_tinker_plugin.tokens.prompts import PromptCache, flatten

STYLES = {"compact": compact_call, "text-before": call_after_text}


def context(name: str) -> DatasetRenderer:
    return DatasetRenderer(renderer(name))


def agent(name: str, style: Callable[[str], str], turns: int) -> Rollout:
    """Play an agent that calls a tool every turn."""
    rollout = Rollout(context(name), tools=[BASH, SUBMIT])
    messages = opening()
    for turn in range(turns):
        output = rollout.turn(messages, style(f"cat file_{turn}.py"))
        assert output.stop_reason == "tool_calls"
        assert output.message.tool_calls is not None
        assert output.message.tool_calls[0].arguments == {"cmd": f"cat file_{turn}.py"}
        messages += [output.message, *tool_results(output, words(360, seed=turn))]
    return rollout


def assert_honest(rollout: Rollout) -> None:
    """Check that the metrics agree with what the trainer makes of the trajectory."""
    data = rollout.data()
    metrics = rollout.tokens.metrics
    assert metrics["tokens/segments"] == len(data)
    # A datum is one token shorter than its sequence: inputs and targets are shifted.
    trained = sum(datum.model_input.length + 1 for datum in data)
    assert metrics["tokens/trained"] == trained
    assert ("tokens/first_divergence" in metrics) == (len(data) > 1)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", ["qwen3_instruct", "qwen3_keep_thinking", "qwen3_disable_keep"])
def test_a_64_turn_tool_episode_is_one_datum(name: str, style: str) -> None:
    rollout = agent(name, STYLES[style], 64)
    (datum,) = rollout.data()
    assert 30_000 < datum.model_input.length < 37_000
    assert rollout.tokens.metrics["tokens/resampled"] == 0
    assert_honest(rollout)


def test_a_renderer_that_strips_thinking_gives_honest_segments() -> None:
    rollout = agent("qwen3", compact_call, 6)
    assert len(rollout.data()) == 6
    assert rollout.tokens.metrics["tokens/first_divergence"] == 1
    assert rollout.tokens.metrics["tokens/resampled"] > 0
    assert_honest(rollout)


def random_reply(rng: random.Random, name: str) -> str:
    text = rng.choice(["Fine.", "Let me see:\n\n- one\n- two", "42", "Ünïcode 🙂 is ok"])
    if name == "qwen3_keep_thinking":
        text = f"<think>\nhm, {rng.randrange(99)}\n</think>\n\n{text}"
    elif name in ("deepseekv4_1_keep", "glm5_3"):
        text = f"hm, {rng.randrange(99)}</think>{text}"
    if name.startswith("qwen3") and rng.random() < 0.6:
        calls = [compact_call(f"ls {rng.randrange(99)}").replace('":', '": ').replace(",", ", ")]
        text += "\n" + "\n".join(calls * rng.choice([1, 1, 2]))
    return text


def random_followers(rng: random.Random, output: ModelOutput, name: str) -> list[ChatMessage]:
    messages = tool_results(output, words(rng.randrange(1, 30), seed=rng.randrange(99)))
    if not messages or rng.random() < 0.3:
        if name.startswith("qwen3") and rng.random() < 0.2:
            messages.append(ChatMessageSystem(content="Time is short."))
        messages.append(ChatMessageUser(content=words(rng.randrange(1, 9), seed=rng.randrange(99))))
    return messages


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FORMATS)
def test_new_messages_are_rendered_as_in_the_whole_conversation(name: str, seed: int) -> None:
    rng = random.Random(f"{name}{seed}")
    shared = context(name)
    tools = [] if name in WITHOUT_TOOLS else [BASH]
    rollout = Rollout(shared, tools=tools)
    messages = opening()[rng.choice([0, 1]) :]
    for turn in range(8):
        text = random_reply(rng, name)
        output = rollout.turn(messages, f" {text}" if name == "role_colon" else text)
        messages += [output.message, *random_followers(rng, output, name)]
        asked = request(messages, tools=tools, index=turn + 1)
        incremental = flatten(rollout.tokens.prompt(asked).chunks)
        whole = EpisodeTokens(shared, task="t", sample_id=1).prompt(asked)
        assert incremental == flatten(whole.chunks)
    assert len(rollout.data()) == 1
    assert_honest(rollout)


def test_sampled_tokens_stay_even_where_the_renderer_would_write_others() -> None:
    rollout = Rollout(context("qwen3_instruct"), tools=[BASH])
    messages = opening()
    output = rollout.turn(messages, compact_call("ls"))
    sampled = rollout.transitions[0].ac.tokens
    messages += [output.message, *tool_results(output, "a.py")]
    rollout.turn(messages, "Done.")
    assert rollout.continues(1, 0)
    first, second = (flatten(transition.ob.chunks) for transition in rollout.transitions)
    tail = tokenizer().decode(second[len(first) + len(sampled) :])
    assert tail == (
        "\n<|im_start|>user\n<tool_response>\na.py\n</tool_response><|im_end|>"
        "\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("name", ["qwen3_instruct", "role_colon", "llama3", "glm5_3"])
def test_a_reply_cut_at_the_token_limit_is_closed_and_continued(name: str) -> None:
    rollout = Rollout(context(name))
    messages: list[ChatMessage] = [ChatMessageUser(content="Tell me a story.")]
    text = ("A fairy tale.</think>" if name == "glm5_3" else "") + "Once upon a"
    output = rollout.turn(messages, text, stop=False, stop_reason="length")
    assert output.stop_reason == "max_tokens"
    assert output.completion == "Once upon a"
    messages += [output.message, ChatMessageUser(content="Go on.")]
    rollout.turn(messages, "time.")
    assert len(rollout.data()) == 1
    whole = EpisodeTokens(rollout.context, task="t", sample_id=1).prompt(request(messages))
    continued = rollout.context.tokenizer.decode(rollout.transitions[1].ob.to_ints())
    if name in ("qwen3_instruct", "llama3"):
        assert continued == rollout.context.tokenizer.decode(whole.to_ints())
    assert "Once upon a" in continued
    assert_honest(rollout)


def test_a_missing_stop_token_is_a_cut_whatever_the_sampler_says() -> None:
    rollout = Rollout(context("qwen3_instruct"))
    assert rollout.turn(opening(), "Half", stop=False, stop_reason=None).stop_reason == "max_tokens"
    assert rollout.tokens.metrics["tokens/truncated_replies"] == 1


EDITS: dict[str, Callable[[Any], object]] = {
    "a reply": lambda messages: setattr(messages[2], "content", "Something else."),
    "arguments": lambda messages: messages[2].tool_calls[0].arguments.update(cmd="rm"),
    "the prompt": lambda messages: setattr(messages[1], "content", "Find another bug."),
    "the first dropped": lambda messages: messages.pop(0),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_conversation_is_rendered_afresh_and_counted(edit: str) -> None:
    rollout = Rollout(context("qwen3_instruct"), tools=[BASH])
    messages = opening()
    output = rollout.turn(messages, compact_call("ls"))
    messages += [output.message, *tool_results(output, "a.py")]
    EDITS[edit](messages)
    rollout.turn(messages, "Done.")
    metrics = rollout.tokens.metrics
    assert metrics["tokens/segments"] == 2
    assert metrics["tokens/first_divergence"] == 1
    assert metrics["tokens/resampled"] == len(rollout.transitions[0].ac.tokens)
    assert_honest(rollout)
    fresh = EpisodeTokens(rollout.context, task="t", sample_id=1)
    expected = fresh.prompt(request(messages, tools=[BASH])).to_ints()
    assert rollout.transitions[1].ob.to_ints() == expected


def test_other_tools_make_another_prompt() -> None:
    rollout = Rollout(context("qwen3_instruct"), tools=[BASH])
    messages = opening()
    output = rollout.turn(messages, "Hm.")
    messages += [output.message, ChatMessageUser(content="Go on.")]
    rollout.turn(messages, "Done.", tools=[BASH, SUBMIT])
    assert len(rollout.data()) == 2
    assert_honest(rollout)


def test_interleaved_conversations_each_continue_their_own() -> None:
    rollout = Rollout(context("qwen3_instruct"), tools=[BASH])
    talks: list[list[ChatMessage]] = [
        [ChatMessageUser(content=f"You are agent {number}.")] for number in range(3)
    ]
    for turn in range(3):
        for talk in talks:
            output = rollout.turn(talk, compact_call(f"step {turn}"))
            talk += [output.message, *tool_results(output, "ok")]
    assert all(rollout.continues(turn + 3, turn) for turn in range(6))
    assert len(rollout.data()) == 3
    assert rollout.tokens.metrics["tokens/resampled"] == 0
    assert_honest(rollout)


def test_going_back_to_an_earlier_turn_keeps_its_sampled_tokens() -> None:
    rollout = Rollout(context("qwen3_instruct"), tools=[BASH])
    messages = opening()
    output = rollout.turn(messages, compact_call("ls"))
    messages += [output.message, *tool_results(output, "a.py")]
    back = len(messages)
    output = rollout.turn(messages, compact_call("cat a.py"))
    messages += [output.message, *tool_results(output, "oops")]
    rollout.turn(messages, "A mistake.")
    for text in ("Other.", "Another."):
        rollout.turn([*messages[:back], ChatMessageUser(content=text)], "Fine.")
    assert all(rollout.continues(later, 0) for later in range(1, 5))
    assert rollout.tokens.metrics["tokens/resampled"] == 0
    assert_honest(rollout)


def test_the_same_prompt_twice_is_two_segments_with_equal_prompts() -> None:
    rollout = Rollout(context("qwen3_instruct"))
    one = rollout.turn(opening(), "One.")
    two = rollout.turn(opening(), "Two.")
    first, second = rollout.transitions
    assert first.ob.to_ints() == second.ob.to_ints()
    for output in (one, two):
        rollout.turn([*opening(), output.message, ChatMessageUser(content="And?")], "So.")
    assert rollout.continues(2, 0)
    assert rollout.continues(3, 1)
    assert_honest(rollout)


def test_a_group_renders_its_common_first_prompt_once() -> None:
    cache = PromptCache()
    shared = context("qwen3_instruct")
    renders = 0
    build = shared.renderer.build_generation_prompt

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal renders
        renders += 1
        return build(*args, **kwargs)

    shared.renderer.build_generation_prompt = counted  # type: ignore[method-assign]
    prompts = [
        Rollout(shared, tools=[BASH], shared_prompts=cache).tokens.prompt(
            request(opening(), tools=[BASH])
        )
        for _ in range(8)
    ]
    assert renders == 1
    assert all(prompt == prompts[0] for prompt in prompts)
    other = EpisodeTokens(shared, task="t", sample_id=1, shared_prompts=cache)
    assert other.prompt(request(opening())) != prompts[0]
    assert renders == 2


def test_a_prompt_cache_is_bounded_and_pickles_empty() -> None:
    cache = PromptCache()
    for number in range(20):
        cache.find_or_make(((str(number),), ()), list)
    assert len(cache._prompts) == 8
    assert not pickle.loads(pickle.dumps(cache))._prompts


def test_a_context_pickles_with_its_renderer() -> None:
    copy = pickle.loads(pickle.dumps(context("qwen3_instruct")))
    prompt = EpisodeTokens(copy, task="t", sample_id=1).prompt(request(opening()))
    expected = EpisodeTokens(context("qwen3_instruct"), task="t", sample_id=1)
    assert prompt == expected.prompt(request(opening()))


class Numbered(RoleColonRenderer):
    """Claims that prompts extend each other, but numbers its messages."""

    def render_message(self, message: Message, ctx: MessagePosition) -> RenderedMessage:
        numbered = message.copy()
        if message["role"] == "user":
            numbered["content"] = f"[{ctx.idx}] {message['content']}"
        return super().render_message(numbered, ctx)


def test_a_renderer_that_breaks_its_promise_is_found_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rollout = Rollout(DatasetRenderer(Numbered(tokenizer())))
    messages: list[ChatMessage] = [ChatMessageUser(content="Zero?")]
    for _ in range(3):
        output = rollout.turn(messages, " Yes.")
        messages += [output.message, ChatMessageUser(content="More?")]
    text = tokenizer().decode(rollout.transitions[-1].ob.to_ints())
    assert "[0] Zero?" in text
    assert "[4] More?" in text
    assert caplog.text.count("renders new messages by what stands before them") == 1
    assert_honest(rollout)


class NamesResults(Qwen3InstructRenderer):
    """Keeps state between messages: each result of a tool tells the name of its call."""

    def build_generation_prompt(self, messages: list[Message], *args: Any) -> Any:
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        self.names = {call.id: call.function.name for call in calls}
        return super().build_generation_prompt(messages, *args)

    def render_message(self, message: Message, ctx: MessagePosition) -> RenderedMessage:
        if message["role"] == "tool":
            name = self.names[message["tool_call_id"]]
            message = Message(role="tool", content=f"{name}: {message['content']}")
        return super().render_message(message, ctx)


def test_a_renderer_may_keep_state_between_messages() -> None:
    rollout = Rollout(DatasetRenderer(NamesResults(tokenizer())), tools=[BASH, SUBMIT])
    messages = opening()
    for turn in range(6):
        output = rollout.turn(messages, compact_call(f"cat file_{turn}.py"))
        messages += [output.message, *tool_results(output, f"result {turn}")]
    rollout.turn(messages, compact_call("ls"))
    assert rollout.tokens.metrics["tokens/segments"] == 1
    assert rollout.tokens.metrics["tokens/continued"] == 6


def test_solver_stop_sequences_join_string_stops() -> None:
    episode = EpisodeTokens(context("role_colon"), task="t", sample_id=1)
    config = GenerateConfig(stop_seqs=["Observation:", "\n\nUser:"])
    assert episode.stop_condition(request([], config=config)) == ["\n\nUser:", "Observation:"]


def test_solver_stop_sequences_of_one_token_join_token_stops(
    caplog: pytest.LogCaptureFixture,
) -> None:
    episode = EpisodeTokens(context("qwen3_instruct"), task="t", sample_id=1)
    config = GenerateConfig(stop_seqs=["\n", "Observation:"])
    (newline,) = tokenizer().encode("\n")
    for _ in range(2):
        stops = episode.stop_condition(request([], config=config))
        assert stops == [*episode._context.stops, newline]
    assert caplog.text.count("'Observation:' is not one token") == 1


def test_text_beyond_a_stop_sequence_never_reaches_the_solver() -> None:
    rollout = Rollout(context("qwen3_instruct"), tools=[BASH])
    config = GenerateConfig(stop_seqs=["Observation:"])
    messages = opening()
    text = "Action: look\nObservation: I made this up.\n" + compact_call("rm -rf /")
    output = rollout.turn(messages, text, config=config)
    assert output.completion == "Action: look\n"
    assert output.stop_reason == "stop"
    assert not output.message.tool_calls
    messages += [output.message, ChatMessageUser(content="Observation: real")]
    rollout.turn(messages, "Done.", config=config)
    prompt = tokenizer().decode(rollout.transitions[1].ob.to_ints())
    assert "made this up" not in prompt
    assert rollout.tokens.metrics["tokens/stop_seq_cuts"] == 1
    assert_honest(rollout)


@pytest.mark.parametrize(
    ("stop", "cut"),
    [
        ("Observation:", "Action: read\nObservation: made up"),
        ("Observation:", "Action: read\nObservation:"),
        ("\n", "Action: read\n"),
    ],
    ids=["several-tokens", "at-its-end", "one-token"],
)
def test_the_trainer_gets_what_the_solver_saw_of_a_cut_reply(stop: str, cut: str) -> None:
    rollout = Rollout(context("qwen3_instruct"))
    config = GenerateConfig(stop_seqs=[stop])
    messages = opening()
    for text in ("Action: look", cut, "Done."):
        output = rollout.turn(messages, text, stop=text != cut, stop_reason=None, config=config)
        assert output.stop_reason == "stop"
        messages += [output.message, ChatMessageUser(content="Observation: real")]
    seen = cut[: cut.index(stop)]
    assert messages[4].text == seen
    (datum,) = rollout.data()
    whole = EpisodeTokens(rollout.context, task="t", sample_id=1).prompt(request(messages[:-2]))
    text = tokenizer().decode(datum.model_input.to_ints())
    assert text.startswith(tokenizer().decode(whole.to_ints()))
    assert "made up" not in text
    mask = sum(datum.loss_fn_inputs["mask"].data)
    unseen = rollout.tokens.metrics["tokens/unseen"]
    assert unseen == len(rollout.transitions[1].ac.tokens) - len(tokenizer().encode(seen)) > 0
    assert mask == rollout.tokens.metrics["tokens/sampled"] - unseen
    assert rollout.tokens.metrics["tokens/resampled"] == 0
    assert_honest(rollout)


def test_a_token_that_a_stop_sequence_begins_within_is_not_trained_on() -> None:
    rollout = Rollout(context("qwen3_instruct"))
    encoded = tokenizer().encode("a = print")
    inside = next(
        word for token in encoded if len(word := str(tokenizer().decode([token])).strip()) > 3
    )
    config = GenerateConfig(stop_seqs=[inside[2:]])
    output = rollout.turn(opening(), "a = print", config=config)
    assert output.completion.endswith(inside[:2])
    rollout.turn(
        [*opening(), output.message, ChatMessageUser(content="Go on.")], "Done.", config=config
    )
    prompt = tokenizer().decode(rollout.transitions[1].ob.to_ints())
    assert f"{output.completion}<|im_end|>" in prompt
    trained = trained_tokens(rollout.data())
    assert inside not in tokenizer().decode(trained)
    assert "Done." in tokenizer().decode(trained)
    assert_honest(rollout)


@pytest.mark.parametrize("name", FORMATS)
def test_a_reply_ends_at_the_token_limit_of_the_solver(name: str) -> None:
    rollout = Rollout(context(name))
    text = "One two three four five six seven."
    whole = rollout.sample(text)
    for limit, cut in ((5, True), (len(whole), False), (len(whole) - 1, True)):
        output = rollout.turn(opening(), text, config=GenerateConfig(max_tokens=limit))
        turn = rollout.tokens.turns[-1]
        assert output.stop_reason == ("max_tokens" if cut else "stop")
        assert turn.kept == limit
        assert output.usage is not None
        assert output.usage.output_tokens == limit
        if limit == 5:
            said = rollout.context.tokenizer.decode(whole[:5])
            assert output.message.text.strip() or output.message.content
            assert output.completion.strip() in ("", said.strip())
            messages = [*opening(), output.message, ChatMessageUser(content="Go on.")]
            rollout.turn(messages, "Done.")
            prompt = rollout.transitions[-1].ob.to_ints()
            start = [*rollout.transitions[-2].ob.to_ints(), *whole[:5]]
            assert prompt[: len(start)] == start
            assert prompt[: len(whole) + len(start) - 5] != [*start, *whole[5:]]
    metrics = rollout.tokens.metrics
    assert metrics["tokens/truncated_replies"] == 2
    assert metrics["tokens/unseen"] == len(whole) - 5 + 1
    assert_honest(rollout)


def test_a_conversation_may_end_with_the_policys_own_reply() -> None:
    for name in ("qwen3_instruct", "qwen3_disable_keep", "llama3", "glm5_3"):
        rollout = Rollout(context(name))
        messages: list[ChatMessage] = [ChatMessageSystem(content="Count.")]
        for _ in range(3):
            text = "hm</think>One." if name == "glm5_3" else "One."
            messages.append(rollout.turn(messages, text).message)
            if name == "qwen3_disable_keep":
                messages.append(ChatMessageUser(content="More."))
        assert_honest(rollout)


def test_tokens_after_the_end_of_turn_are_not_replayed() -> None:
    rollout = Rollout(context("qwen3_instruct"))
    messages = opening()
    asked = request(messages)
    rollout.tokens.prompt(asked)
    sampled = [*rollout.sample("Yes."), *rollout.sample("More.")]
    output = rollout.tokens.parse(sampled, stop_reason="stop", request=asked)
    assert output.completion == "Yes."
    messages += [output.message, ChatMessageUser(content="And?")]
    rollout.turn(messages, "Fine.")
    assert "More." not in tokenizer().decode(rollout.transitions[-1].ob.to_ints())
    assert rollout.tokens.metrics["tokens/segments"] == 1
    assert rollout.tokens.metrics["tokens/unseen"] == len(rollout.sample("More."))


def test_a_prompt_that_is_never_answered_does_not_count() -> None:
    rollout = Rollout(context("qwen3_instruct"))
    rollout.turn(opening(), "Yes.")
    rollout.tokens.prompt(request([ChatMessageUser(content="Something else.")]))
    assert_honest(rollout)


def test_usage_counts_the_prompt_and_the_sample() -> None:
    rollout = Rollout(context("qwen3_instruct"))
    output = rollout.turn(opening(), "Yes.")
    (transition,) = rollout.transitions
    assert output.usage is not None
    assert output.usage.input_tokens == transition.ob.length
    assert output.usage.output_tokens == len(transition.ac.tokens)
    assert output.usage.total_tokens == transition.ob.length + len(transition.ac.tokens)


def test_several_choices_are_refused_as_the_policys_fault() -> None:
    episode = EpisodeTokens(context("qwen3_instruct"), task="t", sample_id=1)
    with pytest.raises(EpisodeError, match="num_choices=4") as raised:
        episode.prompt(request(opening(), config=GenerateConfig(num_choices=4)))
    assert raised.value.cause == Cause.POLICY


def test_options_that_the_sampler_decides_about_warn_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shared = context("qwen3_instruct")
    config = GenerateConfig(temperature=0.5, top_p=0.9, parallel_tool_calls=False)
    for _ in range(3):
        episode = EpisodeTokens(shared, task="t", sample_id=1)
        asked = request(opening(), tools=[BASH], config=config, tool_choice=ToolFunction("bash"))
        episode.prompt(asked)
    assert caplog.text.count("sets temperature, top_p") == 1
    assert caplog.text.count("forces a tool choice") == 1
    assert caplog.text.count("one tool call per reply (parallel_tool_calls)") == 1


def test_each_reply_answers_one_prompt() -> None:
    episode = EpisodeTokens(context("qwen3_instruct"), task="t", sample_id=1)
    with pytest.raises(RuntimeError, match="call that first"):
        episode.parse([], stop_reason=None, request=request(opening()))


def test_a_tool_result_changed_in_place_later_is_noticed() -> None:
    rollout = Rollout(context("qwen3_instruct"), tools=[BASH])
    messages = opening()
    output = rollout.turn(messages, compact_call("ls"))
    result = ChatMessageTool(content="a.py", tool_call_id="x", function="bash")
    messages += [output.message, result]
    output = rollout.turn(messages, compact_call("cat a.py"))
    result.content = "(trimmed)"
    messages += [output.message, *tool_results(output, "text")]
    rollout.turn(messages, "Done.")
    assert "(trimmed)" in tokenizer().decode(rollout.transitions[2].ob.to_ints())
    assert_honest(rollout)
