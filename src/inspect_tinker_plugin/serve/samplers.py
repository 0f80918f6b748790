"""What a caller lends: a function that continues a prompt of tokens."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from inspect_tinker_plugin.contracts.errors import InspectRLError
from inspect_tinker_plugin.contracts.wording import counted


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
                log-probability per token.
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
        if not isinstance(self.policy_version, int | str | None):
            raise SamplerError("the sampler's policy_version is neither a number nor a text")


Sampler = Callable[[Prompt], Awaitable[Sampled]]
"""A function that continues a prompt; what it raises is the failure of its episode."""
