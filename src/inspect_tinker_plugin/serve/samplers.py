"""What continues a prompt of tokens: a function that a caller lends, or a model server.

vLLM and SGLang answer ``/v1/completions`` and vLLM ``/inference/v1/generate`` with token ids and
log-probabilities. A server that returns text only cannot be used: its text would have to be
encoded again.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp
from pydantic import BaseModel, ConfigDict, Field

from inspect_tinker_plugin.contracts.errors import ConfigError, InspectRLError
from inspect_tinker_plugin.contracts.wording import counted

logger = getLogger(__name__)

Form = Literal["completions", "generate"]

_PATHS = {"completions": "v1/completions", "generate": "inference/v1/generate"}

MAX_ANSWER = 2**27
"""Bytes of an answer at most; less where 4 KiB per token of prompt and reply is less."""

_ROUNDING = 0.01
"""How far above 0 rounding may bring the log-probability of a certain token."""

SESSION_HEADER = "X-Session-ID"
"""Header with the id of the episode, by which routers choose an engine."""


class SamplerError(InspectRLError):
    """The sampler failed, or what it returned cannot be trained on."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What the policy is asked to continue."""

    tokens: Sequence[int]
    """The whole prompt, as token ids."""

    stop: Sequence[str] | Sequence[int]
    """Stop sequences or stop tokens; sampled ones belong to the reply."""

    max_tokens: int | None = None
    """Maximum tokens of the reply; ``None`` leaves it to the sampler."""

    episode: str = ""
    """Id of the episode, the same in all of its turns: servers keep its prefix in their cache."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """A sampled reply."""

    tokens: Sequence[int]
    """Everything that was sampled, the stop token included."""

    logprobs: Sequence[float]
    """Log-probability of each token, under the policy that sampled it."""

    stop_reason: Literal["stop", "length"] = "stop"
    """``length`` marks a reply that was cut at the token limit."""

    policy_version: int | str | None = None
    """The weights that sampled it, if the sampler says so."""

    def __post_init__(self) -> None:
        """Check that it can be trained on.

        Raises:
            SamplerError: There is no token, one is no token id, or there is not one finite
                log-probability per token, at most 0 but for rounding.
        """
        if not self.tokens:
            raise SamplerError("the sampler returned an empty reply, without even a stop token")
        if not all(type(token) is int and token >= 0 for token in self.tokens):
            raise SamplerError("the sampler returned something else than token ids")
        if self.stop_reason not in ("stop", "length"):
            raise SamplerError(f"the sampler ended a reply with {self.stop_reason!r}")
        if len(self.tokens) != len(self.logprobs):
            raise SamplerError(
                f"the sampler returned {len(self.logprobs)} log-probabilities for "
                f"{counted(len(self.tokens), 'token')}"
            )
        if not all(math.isfinite(value) for value in self.logprobs):
            raise SamplerError("the sampler returned a log-probability that is no finite number")
        if (most := max(self.logprobs)) > _ROUNDING:
            raise SamplerError(f"the sampler returned {most:g} as a log-probability: it is above 0")
        if not isinstance(self.policy_version, int | str | None):
            raise SamplerError("the sampler's policy_version is neither a number nor a text")


Sampler = Callable[[Prompt], Awaitable[Sampled]]
"""A function that continues a prompt; what it raises is the failure of its episode."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where and how to sample."""

    url: str
    """Address of the server: ``http://host:8000/v1``."""

    model: str = ""
    """Name of the model or adapter."""

    form: Form = "completions"
    """``completions`` for ``/v1/completions``, ``generate`` for ``/inference/v1/generate``."""

    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    max_tokens: int = 1024
    """Maximum tokens per turn, if ``sampling`` does not say it."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters in the server's words: ``temperature``, ``top_p`` …"""

    timeout: float = 3600.0
    """Seconds that one turn may take."""

    policy_version: int | str | None = None
    """The weights' version, if the server does not say it (``weight_version`` in its metadata)."""

    def __post_init__(self) -> None:
        """Check the address and the number of tokens.

        Raises:
            ConfigError: It is none.
        """
        most = self.sampling.get("max_tokens")
        if most is not None and (type(most) is not int or most < 1):
            raise ConfigError(f"max_tokens of the sampling is {most!r:.40}, not a number from 1")
        if {"?", "#", "@"} & set(self.url):
            raise ConfigError("the sampler's address has a query, a fragment or a password")
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # of a port or of brackets
            usable = False
        if not usable:
            raise ConfigError(
                f"the sampler's address {self.url!r} is not http://host:port/... or https://..."
            )

    @property
    def address(self) -> str:
        """The address that turns are sent to."""
        root = self.url.rstrip("/").removesuffix("/v1")
        return f"{root}/{_PATHS[self.form]}"


class EndpointSampler:
    """Samples from a model server.

    Args:
        endpoint: The server.
        session: Connections to share with others; its owner closes it.
    """

    def __init__(self, endpoint: Endpoint, session: aiohttp.ClientSession) -> None:
        self.endpoint = endpoint
        self._session = session
        self._headers = {**endpoint.headers, "Content-Type": "application/json"}
        if endpoint.api_key is not None:
            self._headers["Authorization"] = f"Bearer {endpoint.api_key}"

    async def __call__(self, prompt: Prompt) -> Sampled:
        """Sample one reply.

        Raises:
            SamplerError: The server cannot be reached, refuses, or returns no token ids.
        """
        try:
            async with self._session.post(
                self.endpoint.address,
                # A file, which does not hold up the event loop however long the prompt is.
                data=io.BytesIO(json.dumps(self._body(prompt)).encode()),
                headers={**self._headers, SESSION_HEADER: prompt.episode},
                timeout=aiohttp.ClientTimeout(total=self.endpoint.timeout),
                allow_redirects=False,
            ) as response:
                if response.status >= 300:
                    # The failure reaches who asked for the episode, who may not be allowed to read
                    # this server.
                    text = await response.content.read(500)
                    logger.warning("%s: %d %r", self.endpoint.address, response.status, text)
                    raise SamplerError(
                        f"{self.endpoint.address} answered {response.status}; its text is logged"
                    )
                most = 2**20 + 2**12 * (len(prompt.tokens) + self._room(prompt))
                answer = json.loads(await self._read_body(response, min(most, MAX_ANSWER)))
        except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
            reason = str(error) or type(error).__name__
            raise SamplerError(f"{self.endpoint.address}: {reason}") from error
        return self._read(answer, prompt)

    async def _read_body(self, response: aiohttp.ClientResponse, most: int) -> bytes:
        body = bytearray()
        async for part in response.content.iter_any():
            body += part
            if len(body) > most:
                raise SamplerError(f"{self.endpoint.address} answered more than {most:,} bytes")
        return bytes(body)

    def _body(self, prompt: Prompt) -> dict[str, Any]:
        endpoint = self.endpoint
        stop = list(prompt.stop)
        by_token = stop and isinstance(stop[0], int)
        params: dict[str, Any] = {
            **endpoint.sampling,
            "max_tokens": self._room(prompt),
            "logprobs": 1,
            "skip_special_tokens": False,
            "stop_token_ids" if by_token else "stop": stop,
        }
        if not by_token:
            params["include_stop_str_in_output"] = True
        if endpoint.form == "generate":
            return {
                "model": endpoint.model,
                "token_ids": list(prompt.tokens),
                "sampling_params": params,
            }
        return {
            **params,
            "model": endpoint.model,
            "prompt": list(prompt.tokens),
            "return_token_ids": True,
        }

    def _room(self, prompt: Prompt) -> int:
        most = self.endpoint.sampling.get("max_tokens") or self.endpoint.max_tokens
        return most if prompt.max_tokens is None else min(prompt.max_tokens, most)

    def _read(self, answer: Any, prompt: Prompt) -> Sampled:
        """Read a reply; nothing of it is decoded or encoded.

        Raises:
            SamplerError: It has no token ids, no log-probabilities, or is to another prompt.
        """
        address = self.endpoint.address
        try:
            choice = answer["choices"][0]
            tokens = list(choice["token_ids"])
            logprobs = _logprobs(choice["logprobs"])
            finish = choice["finish_reason"]
            asked = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
            told = (answer.get("metadata") or {}).get("weight_version")
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise SamplerError(
                f"{address} returned no token ids with log-probabilities in the form of vLLM and "
                f"SGLang, in recent releases ({error!r:.100})"
            ) from error
        if asked is not None and asked != list(prompt.tokens):
            raise SamplerError(f"{address} has sampled for other prompt tokens")
        if finish not in ("stop", "length"):
            raise SamplerError(f"{address} ended a reply with {finish!r:.40}")
        if len(tokens) > self._room(prompt):
            raise SamplerError(f"{address} has sampled more tokens than it was asked")
        return Sampled(
            tokens=tokens,
            logprobs=logprobs,
            stop_reason=finish,
            policy_version=self.endpoint.policy_version if told is None else told,
        )


def _logprobs(given: Any) -> list[float]:
    if "content" in given:  # of chat completions, and of `/inference/v1/generate`
        return [float(entry["logprob"]) for entry in given["content"]]
    return [float(value) for value in given["token_logprobs"]]


class LentSampler(BaseModel):
    """The model server that a request lends; see ``Endpoint``."""

    model_config = ConfigDict(extra="forbid")

    url: str
    model: str = ""
    form: Form = "completions"
    api_key: str | None = None
    max_tokens: int = Field(default=1024, ge=1)
    sampling: dict[str, Any] = {}
    policy_version: int | str | None = None

    def endpoint(self) -> Endpoint:
        """Return the server.

        Raises:
            ConfigError: Its address is none.
        """
        return Endpoint(**self.model_dump())
