"""A served model answers the released clients of OpenAI and Anthropic as an eval is answered."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner
from tests.evaluate.test_provider import Client, model

from inspect_tinker_plugin.cli.main import rl
from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.evaluate import serving
from inspect_tinker_plugin.evaluate.serving import serve_model
from inspect_tinker_plugin.testing.policy import load_tokenizer

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

CALL = (
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2.5, true]}}\n</tool_call><|im_end|>'
)
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {}}},
            "required": ["a"],
        },
    },
}
PIXEL: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
ASK: Any = [{"role": "user", "content": "Say plum."}]


@asynccontextmanager
async def served(sampler: Client, token: str | None = None, **how: Any) -> AsyncIterator[str]:
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    running = asyncio.ensure_future(
        serve_model(
            model(sampler, **how), host="127.0.0.1", port=0, token=token, ready=port.set_result
        )
    )
    try:
        yield f"http://127.0.0.1:{await port}"
    finally:
        running.cancel()
        await asyncio.wait([running])


def client(address: str, key: str = "none") -> Any:
    return openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)


async def test_a_chat_has_true_stop_reasons_usage_and_options() -> None:
    sampler = Client()
    async with served(sampler) as address, client(address) as asked:
        said = await asked.chat.completions.create(
            model="any", messages=ASK, temperature=0.25, max_tokens=7, top_p=0.5, seed=3, stop=["X"]
        )
        [listed] = (await asked.models.list()).data
    [choice] = said.choices
    assert (choice.message.content, choice.finish_reason) == ("plum", "stop")
    [sent] = sampler.asked
    params = sent["params"]
    assert (params.temperature, params.max_tokens, params.top_p, params.seed) == (0.25, 7, 0.5, 3)
    assert "X" in str(params.stop) or len(params.stop) > 1
    assert said.usage.prompt_tokens == sent["prompt"].length
    assert said.usage.completion_tokens == len(load_tokenizer().encode("plum<|im_end|>"))
    assert listed.id == said.model


@pytest.mark.parametrize(("reply", "reason"), [("plum plum plum", "length"), (CALL, "tool_calls")])
async def test_a_stream_ends_with_the_reason_of_the_reply(reply: str, reason: str) -> None:
    async with served(Client(reply)) as address, client(address) as asked:
        stream = await asked.chat.completions.create(
            model="any",
            messages=ASK,
            tools=[ADD],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert choices[-1].finish_reason == reason
    assert chunks[-1].usage.completion_tokens == len(load_tokenizer().encode(reply))
    calls = [call for each in choices for call in each.delta.tool_calls or ()]
    arguments = "".join(call.function.arguments or "" for call in calls)
    if reason == "tool_calls":
        assert arguments == '{"a": 1, "b": [2.5, true]}'
    else:
        assert "".join(each.delta.content or "" for each in choices) == reply


async def test_a_conversation_continues_the_sampled_tokens() -> None:
    sampler = Client(CALL)
    async with served(sampler) as address, client(address) as asked:
        first = await asked.chat.completions.create(model="any", messages=ASK, tools=[ADD])
        message = first.choices[0].message.model_dump(exclude_none=True)
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
        await asked.chat.completions.create(
            model="any", messages=[*ASK, message, result], tools=[ADD]
        )
    before, after = (each["prompt"].to_ints() for each in sampler.asked)
    begun = [*before, *load_tokenizer().encode(CALL)]
    assert after[: len(begun)] == begun


async def test_responses_and_messages_are_answered_too() -> None:
    async with served(Client()) as address:
        async with client(address) as asked:
            response = await asked.responses.create(model="any", input="Say plum.")
        assert response.output_text == "plum"
        async with anthropic.AsyncAnthropic(base_url=address, api_key="none") as other:
            said = await other.messages.create(model="any", max_tokens=9, messages=ASK)
            assert (said.content[0].text, said.stop_reason) == ("plum", "end_turn")
            async with other.messages.stream(model="any", max_tokens=9, messages=ASK) as stream:
                assert await stream.get_final_text() == "plum"


async def test_only_clients_with_the_token_are_answered() -> None:
    sampler = Client()
    async with served(sampler, token="a-long-enough-token") as address:
        for key in ("none", "a-long-enough-toke"):
            async with client(address, key) as asked:
                with pytest.raises(openai.AuthenticationError):
                    await asked.chat.completions.create(model="any", messages=ASK)
        assert sampler.asked == []
        async with client(address, "a-long-enough-token") as asked:
            await asked.chat.completions.create(model="any", messages=ASK)
    assert len(sampler.asked) == 1


@pytest.mark.parametrize("header", [{"Origin": "http://a.page"}, {"Host": "a.page"}])
async def test_web_pages_are_not_answered_without_a_token(header: dict[str, str]) -> None:
    sampler = Client()
    async with served(sampler) as address, client(address) as asked:
        with pytest.raises(openai.AuthenticationError):
            await asked.chat.completions.create(model="any", messages=ASK, extra_headers=header)
    assert sampler.asked == []


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("frequency_penalty", {"frequency_penalty": 0.5}),
        ("json_object", {"response_format": {"type": "json_object"}}),
        ("modalities", {"modalities": ["audio"]}),
        ("top_k", {"extra_body": {"top_k": 2}}),
        ("image", {"messages": [{"role": "user", "content": [PIXEL]}]}),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(name: str, options: Any) -> None:
    sampler = Client()
    async with served(sampler) as address, client(address) as asked:
        with pytest.raises(openai.BadRequestError, match=name):
            await asked.chat.completions.create(**{"model": "any", "messages": ASK, **options})
    assert sampler.asked == []


@pytest.mark.parametrize("path", ["/mcp/tools", "/v1beta/models/any:generateContent", "/v1/other"])
async def test_what_is_not_served_is_not_found(path: str) -> None:
    asked = {"method": "tools/list", "contents": []}
    async with (
        served(Client()) as address,
        aiohttp.ClientSession() as session,
        session.post(address + path, json=asked) as answer,
    ):
        assert answer.status == 404
        assert path in (await answer.json())["error"]["message"]


async def test_what_agents_say_about_themselves_has_no_effect() -> None:
    bare: Any = {"name": "add", "input_schema": {"type": "object", "properties": {}}}
    async with served(Client()) as address:
        async with anthropic.AsyncAnthropic(base_url=address, api_key="none") as asked:
            said = await asked.messages.create(
                model="any", max_tokens=9, messages=ASK, tools=[bare], metadata={"user_id": "me"}
            )
            assert said.content[0].text == "plum"
        async with client(address) as other:
            response = await other.responses.create(
                model="any", input="Say plum.", store=False, prompt_cache_key="me"
            )
            assert response.output_text == "plum"


async def test_log_probabilities_are_in_a_chat_and_in_a_stream_of_one() -> None:
    async with served(Client()) as address, client(address) as asked:
        whole = await asked.chat.completions.create(model="any", messages=ASK, logprobs=True)
        stream = await asked.chat.completions.create(
            model="any", messages=ASK, logprobs=True, stream=True
        )
        choices = [chunk.choices[0] async for chunk in stream]
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    found = [each for choice in choices if choice.logprobs for each in choice.logprobs.content]
    assert found == whole.choices[0].logprobs.content


async def test_a_prompt_over_the_window_is_refused() -> None:
    sampler = Client()
    async with served(sampler, window=8) as address, client(address) as asked:
        with pytest.raises(openai.BadRequestError, match="the model takes 8 with the reply"):
            await asked.chat.completions.create(model="any", messages=ASK)
    assert sampler.asked == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_tokens": 2.5}, "max_tokens: Input should be a valid integer"),
        ({"max_tokens": "5"}, "max_tokens: Input should be a valid integer"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"tool_choice": "bogus"}, "in bridged request"),
        ({"messages": [{"content": "a"}]}, "the request cannot be read: it lacks 'role'"),
        ({"tools": ["add"]}, r"tools\.0: Input should be a valid dictionary"),
        ({"stop": 5}, "in bridged request"),
        ({"tools": [{"type": "custom", "custom": {"name": "z"}}]}, '"custom" tool calls'),
    ],
)
async def test_a_malformed_request_is_no_failure_of_the_server(options: Any, says: str) -> None:
    async with served(Client()) as address, client(address) as asked:
        with pytest.raises(openai.BadRequestError, match=says):
            await asked.chat.completions.create(
                **{"model": "any", "messages": ASK, "tools": [ADD], **options}
            )


async def test_a_tool_needs_no_parameters() -> None:
    sampler = Client()
    tool: Any = {"type": "function", "function": {"name": "look_around"}}
    async with served(sampler) as address, client(address) as asked:
        await asked.chat.completions.create(model="any", messages=ASK, tools=[tool])
        flat: Any = {"type": "function", "name": "look_around"}
        await asked.responses.create(model="any", input="Say plum.", tools=[flat])
    for sent in sampler.asked:
        assert "look_around" in load_tokenizer().decode(sent["prompt"].to_ints())


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search"},
        {"type": "code_interpreter", "container": {"type": "auto"}},
        {"type": "mcp", "server_label": "there", "server_url": "http://127.0.0.1:9"},
    ],
    ids=lambda tool: tool["type"],
)
async def test_the_model_is_offered_no_tool_that_nobody_carries_out(tool: Any) -> None:
    sampler = Client()
    add = {"type": "function", **ADD["function"]}
    async with served(sampler) as address, client(address) as asked:
        for tools in ([add], [add, tool]):
            await asked.responses.create(model="any", input="Say plum.", tools=tools)
    alone, beside = (each["prompt"].to_ints() for each in sampler.asked)
    assert alone == beside


@pytest.mark.parametrize("form", ["file://{}", "{}"])
async def test_a_path_in_a_request_is_no_file_of_this_machine(tmp_path: Path, form: str) -> None:
    (tmp_path / "private.png").write_bytes(b"\x89PNG")
    image = {"url": form.format(tmp_path / "private.png")}
    ask: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": image}]}]
    async with served(Client()) as address, client(address) as asked:
        with pytest.raises(openai.BadRequestError, match="must be an inline 'data:' URI"):
            await asked.chat.completions.create(model="any", messages=ask)


async def test_the_clients_that_the_bridge_answers_are_made_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[object] = []
    init = openai.AsyncOpenAI.__init__

    def count(self: object, **options: Any) -> None:
        made.append(self)
        init(self, **options)

    async with served(Client()) as address, client(address) as asked:
        await asked.chat.completions.create(model="any", messages=ASK)
        monkeypatch.setattr(openai.AsyncOpenAI, "__init__", count)
        await asked.chat.completions.create(model="any", messages=ASK)
        await asked.responses.create(model="any", input="Say plum.")
    assert made == []


async def test_openais_client_puts_a_streamed_response_together() -> None:
    add = {"type": "function", **ADD["function"]}
    async with (
        served(Client(CALL)) as address,
        client(address) as asked,
        asked.responses.stream(model="any", input="Add.", tools=[add]) as stream,
    ):
        said = await stream.get_final_response()
    assert said.output[-1].arguments == '{"a": 1, "b": [2.5, true]}'


async def test_a_response_that_was_cut_is_incomplete() -> None:
    async with served(Client("plum plum plum")) as address, client(address) as asked:
        whole = await asked.responses.create(model="any", input="Say plum.")
        stream = await asked.responses.create(model="any", input="Say plum.", stream=True)
        last = [event async for event in stream][-1]
    assert last.type == "response.incomplete"
    for each in (whole, last.response):
        assert each.status == "incomplete"
        assert each.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["chat/completions", "responses", "messages"])
async def test_nothing_is_sampled_for_a_client_that_has_left(api: str, stream: bool) -> None:
    began, left = asyncio.Event(), asyncio.Event()

    class Slow(Client):
        async def sample(self, *args: Any, **further: Any) -> Any:
            began.set()
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                left.set()
                raise

    said = {"input": "Say plum."} if api == "responses" else {"messages": ASK, "max_tokens": 9}
    body = {"model": "any", "stream": stream, **said}
    async with served(Slow()) as address, aiohttp.ClientSession() as session:

        async def ask() -> bytes:
            async with session.post(f"{address}/v1/{api}", json=body) as answer:
                return await answer.read()  # the headers of a stream may come first

        asking = asyncio.ensure_future(ask())
        async with asyncio.timeout(60):
            await began.wait()
            asking.cancel()
            await session.close()
            await left.wait()
            while any("Model" in repr(task) for task in asyncio.all_tasks()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", [RuntimeError, TypeError])
async def test_a_failure_of_the_server_is_one_of_the_gateway(kind: type[Exception]) -> None:
    class Broken(Client):
        async def sample(self, *args: Any, **further: Any) -> Any:
            raise kind("the engine has gone")

    async with served(Broken()) as address, client(address) as asked:
        with pytest.raises(openai.InternalServerError, match="the engine has gone"):
            await asked.chat.completions.create(model="any", messages=ASK)


async def test_an_address_that_another_server_has_is_an_error() -> None:
    async with served(Client()) as address:
        port = int(address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be opened: Address"):
            await serve_model(model(Client()), host="127.0.0.1", port=port, token=None, ready=print)


async def test_without_its_extra_nothing_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    serving._make_client.cache_clear()
    with pytest.raises(ConfigError, match=r"openai is not installed.*\[agents\]"):
        await serve_model(model(Client()), host="127.0.0.1", port=0, token=None, ready=print)


def test_other_machines_need_a_token(tmp_path: Any) -> None:
    said = CliRunner().invoke(rl, ["serve-model", "Qwen/Qwen3-8B", "--host", "0.0.0.0"])
    assert said.exit_code == 1
    assert "give --token-file" in said.output
