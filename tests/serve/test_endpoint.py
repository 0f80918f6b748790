"""Model servers that return token ids serve as samplers; others are refused, and said to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import test_utils, web
from tests.rl.policies import Words, renderer, tool_call
from tests.rl.tasks import adding
from tests.serve.engine import serving
from tests.serve.lent import lend

from inspect_tinker_plugin import ConfigError
from inspect_tinker_plugin.serve import Endpoint, EndpointSampler, RolloutResult, RolloutService
from inspect_tinker_plugin.serve.samplers import Form

LINES = [tool_call("add", '{"x": 0, "y": 1}'), "It is 1."]


async def sampled_from(url: str, **lent: Any) -> RolloutResult:
    """Run an episode that samples from a model server."""
    async with aiohttp.ClientSession() as session:
        sampler = EndpointSampler(Endpoint(url=url, **lent), session)
        return await RolloutService(adding(), renderer()).run_episode(0, sampler)


async def over_the_wire(form: Form, **fault: Any) -> RolloutResult:
    async with serving(Words(LINES), **fault) as url:
        return await sampled_from(url, form=form)


def complaint(result: RolloutResult) -> str:
    assert result.failure is not None
    return result.failure.message


@pytest.mark.parametrize(("form", "version"), [("completions", "w7"), ("generate", None)])
async def test_a_model_server_samples_what_a_function_would(
    form: Form, version: str | None
) -> None:
    served = await over_the_wire(form)
    service = RolloutService(adding(), renderer())
    own = await service.run_episode(0, lend(Words(LINES)))
    assert (served.reward, served.failure) == (own.reward, None)
    for branch, other in zip(served.branches, own.branches, strict=True):
        assert branch.tokens == other.tokens
        assert branch.logprobs == other.logprobs
        assert branch.mask == other.mask
    assert [each.policy_version for each in served.branches[0].spans] == [version, version]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"token_ids": None}, "returned no token ids"),
        ({"logprobs": None}, "returned no token ids"),
        ({"logprobs": {"token_logprobs": ["a" * 999]}}, "returned no token ids"),
        ({"logprobs": {"token_logprobs": [10**999]}}, "returned no token ids"),
        ({"prompt_token_ids": [1, 2]}, "for other prompt tokens"),
        ({"finish_reason": "abort"}, "ended a reply with 'abort'"),
        ({"finish_reason": "secret " * 99}, "'secret secret secret"),
        ({"token_ids": [1.0, 2.0]}, "something else than token ids"),
        ({"token_ids": ["1", "2"]}, "something else than token ids"),
        ({"token_ids": [True], "logprobs": {"token_logprobs": [-0.5]}}, "else than token ids"),
        ({"token_ids": [10**9], "logprobs": {"token_logprobs": [-0.5]}}, "of another model?"),
        ({"token_ids": [10**99], "logprobs": {"token_logprobs": [-0.5]}}, "of another model?"),
        ({"token_ids": [1], "logprobs": {"token_logprobs": [float("nan")]}}, "no finite number"),
        ({"more": "x" * 2**23}, "answered more than"),
    ],
)
async def test_an_answer_that_cannot_be_trained_on_is_a_failure(
    fault: dict[str, Any], message: str
) -> None:
    result = await over_the_wire("completions", **fault)
    assert result.reward is None
    assert result.failure is not None
    assert result.failure.cause == "sampler"
    assert message in result.failure.message
    assert len(result.failure.message) < 300


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 10**5, "recursion"),
        ("null", "returned no token ids"),
        (
            '{"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [-1]}, '
            '"finish_reason": "stop"}], "metadata": "v1"}',
            "returned no token ids",
        ),
    ],
)
async def test_an_answer_of_another_form_is_said_to_be_by_its_address(
    text: str, message: str
) -> None:
    said = complaint(await lent_address(lambda: web.Response(text=text)))
    assert "/v1/completions" in said
    assert message in said


@pytest.mark.parametrize("version", [{}, [1.5], 2.5])
async def test_a_version_of_the_weights_is_a_number_or_a_text(version: Any) -> None:
    reply = {"token_ids": [1], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "stop"}
    answer = {"choices": [reply], "metadata": {"weight_version": version or {"a": 1}}}
    said = complaint(await lent_address(lambda: web.json_response(answer)))
    assert "policy_version" in said


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"prompt": [1], "return_token_ids": False}, None),
        ({"max_tokens": 3}, "more tokens than it was asked"),
    ],
    ids=["no other prompt", "the limit"],
)
async def test_sampling_parameters_set(sampling: dict[str, Any], message: str | None) -> None:
    async with serving(Words(LINES)) as url:
        failure = (await sampled_from(url, sampling=sampling)).failure
    assert failure is None if message is None else failure and message in failure.message


@pytest.mark.parametrize("most", [0, -1, 1.5, True, "7", [7]])
def test_a_number_of_tokens_is_checked_first(most: Any) -> None:
    with pytest.raises(ConfigError, match="max_tokens of the sampling is"):
        Endpoint(url="http://localhost:8000/v1", sampling={"max_tokens": most})


async def lent_address(answer: Callable[[], web.Response]) -> RolloutResult:
    """Run an episode that samples from an address with this answer."""

    async def complete(request: web.Request) -> web.Response:
        return answer()

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    async with test_utils.TestServer(app) as other:
        return await sampled_from(str(other.make_url("/v1")))


async def test_a_server_that_is_not_there_is_a_failure_with_its_address() -> None:
    said = complaint(await sampled_from("http://127.0.0.1:9/v1"))
    assert "http://127.0.0.1:9/v1/completions" in said


async def test_what_a_server_says_to_a_refused_request_is_logged_and_not_returned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse() -> web.Response:
        return web.Response(status=403, text="a secret of this network")

    said = complaint(await lent_address(refuse))
    assert "answered 403" in said
    assert "secret" not in said
    assert "a secret of this network" in caplog.text


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("localhost:8000", "is not http"),
        ("http://localhost:port/v1", "is not http"),
        ("http:///v1", "is not http"),
        ("http://me:secret@localhost/v1", "has a query, a fragment or a password"),
    ],
)
def test_an_address_is_checked_first(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Endpoint(url=url)
