"""A dataset's renderer: what is known of it, and what it can honour.

Facts about a renderer are computed once. Of the sampling options that a solver asks for, an
environment can honour the stop condition.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from typing import Any

import tinker
from tinker_cookbook.image_processing_utils import get_image_processor
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.tokenizer_utils import Tokenizer

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.episodes import TurnRequest
from inspect_tinker_plugin.contracts.errors import RendererError
from inspect_tinker_plugin.contracts.policy import POLICY_MODEL
from inspect_tinker_plugin.contracts.wording import spell_out
from inspect_tinker_plugin.tokens.prompts import Extension, PromptTail, flatten
from inspect_tinker_plugin.tokens.replies import ReplyParser
from inspect_tinker_plugin.tokens.tokenizers import ControlTokens, copy_with, own_tokenizer

SAMPLER_OPTIONS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "logprobs",
    "top_logprobs",
    "reasoning_effort",
    "reasoning_tokens",
    "response_schema",
)
"""Options that the trainer decides: an environment passes on a stop condition, and cuts replies
at ``max_tokens``."""


EFFORTS = {
    "none": 0.0,
    "minimal": 0.01,
    "low": 0.3,
    "medium": 0.6,
    "high": 0.9,
    "xhigh": 0.99,
    "max": 0.99,
}
"""Inspect's names of a reasoning effort as the numbers that a renderer may take
(https://tinker-docs.thinkingmachines.ai/cookbook/inkling/thinking-effort/)."""


def stop_condition(
    context: DatasetRenderer, request: TurnRequest, task: str
) -> list[str] | list[int]:
    """Return the renderer's stop sequences together with the solver's.

    A sampler takes strings or token ids, not both. A stop sequence that is one token joins
    a renderer's ids; for any other, the reply is cut when it is parsed.
    """
    wanted = [spell_out(seq) for seq in request.config.stop_seqs or [] if seq]
    texts = [stop for stop in context.stops if isinstance(stop, str)]
    if texts:
        return list(dict.fromkeys([*texts, *wanted]))
    ids = [stop for stop in context.stops if isinstance(stop, int)]
    for seq in wanted:
        tokens = context.tokenizer.encode(seq, add_special_tokens=False)
        if len(tokens) == 1:
            ids.append(tokens[0])
        else:
            context.warn_once(
                f"stop_seqs:{seq}",
                f"task {task!r}: the stop sequence {seq!r} is not one token, so the sampler "
                "cannot stop at it; replies are cut there afterwards.",
            )
    return list(dict.fromkeys(ids))


def warn_of_ignored(context: DatasetRenderer, request: TurnRequest, task: str) -> None:
    """Warn, once per dataset, about options that have no effect in training."""
    config = vars(request.config)
    ignored = [
        name
        for name in SAMPLER_OPTIONS
        if config.get(name) is not None
        and not (name == "reasoning_effort" and context.effort(config[name]) is not None)
    ]
    if ignored:
        context.warn_once(
            f"config:{','.join(ignored)}",
            f"task {task!r} sets {', '.join(ignored)}; the trainer's sampler decides about "
            "these, so they have no effect.",
        )
    if request.tool_choice not in ("auto", "none") and request.tools:
        context.warn_once(
            "tool_choice",
            f"task {task!r} forces a tool choice ({request.tool_choice}), which cannot be "
            "imposed on the sampler: the policy is free to answer as it likes.",
        )
    # The bridge itself sets the option, for every program.
    if request.config.parallel_tool_calls is False and request.tools and request.dialect is None:
        context.warn_once(
            "parallel_tool_calls",
            f"task {task!r} asks for one tool call per reply (parallel_tool_calls), which cannot "
            "be imposed on the sampler: the policy may call several tools at once.",
        )


logger = logging.getLogger(__name__)

ONE_AT_A_TIME = threading.RLock()
"""Held while a renderer works: rollouts may run in several threads, each with its own loop,
and renderers are not known to be thread-safe."""


class DatasetRenderer:
    """A renderer with facts that are computed once per dataset.

    Picklable when the renderer is, as those of the cookbook's ``get_renderer()`` are.

    Attributes:
        renderer: a copy of the renderer, which knows the marks of :class:`ControlTokens`.

    Args:
        renderer: the renderer of the model under training.
        model: name of the policy in messages.
    """

    def __init__(self, renderer: Renderer, *, model: str = POLICY_MODEL) -> None:
        self._given = renderer
        self.tokenizer: Tokenizer = own_tokenizer(renderer.tokenizer)
        self.renderer = with_image_processor(copy_with(renderer, tokenizer=self.tokenizer))
        self.images = carries_images(self.renderer)
        self.model = model
        with ONE_AT_A_TIME:
            self._set_up()

    def _set_up(self) -> None:
        self.stops: list[str] | list[int] = self.renderer.get_stop_sequences()
        self.control = ControlTokens(self.renderer, self.stops)
        self.renderer = self.control.renderer
        self.parser = ReplyParser(
            self.renderer,
            self.tokenizer,
            stops=self.stops,
            control=self.control,
            model=self.model,
        )
        self.extension = Extension(self.renderer, self.tokenizer, self.stops)
        self.extends = bool(self.renderer.has_extension_property)
        build = inspect.signature(self.renderer.build_generation_prompt)
        self._takes_effort = "effort" in build.parameters
        self._tails: dict[tuple[str, ...], int] = {}
        self._warned: set[str] = set()

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the renderer only; the tokenizer is loaded with it."""
        return functools.partial(DatasetRenderer, model=self.model), (self._given,)

    def write(self, text: str) -> str:
        """Return a text as the renderer gets it: no half surrogate pair, no control token."""
        return self.control.break_control(spell_out(text))

    def count_tokens(self, text: str) -> int:
        """Return how many tokens a text has."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def warn_of_splits(self, task: str) -> None:
        """Warn once if each turn of an episode becomes a training sequence of its own."""
        name = getattr(self.renderer, "_renderer_name", None)
        if self.extends or (name or "").endswith("_preserve_thinking"):
            return
        self.warn_once(
            "splits",
            f"task {task!r}: the renderer {name or type(self.renderer).__name__} writes earlier "
            "turns again (it strips their reasoning), so a turn of a longer episode is a training "
            "sequence of its own. docs/renderers.md says which renderers keep an episode in one.",
        )

    def warn_once(self, topic: str, message: str) -> None:
        """Log a warning the first time that a topic comes up in this dataset."""
        if topic not in self._warned:
            self._warned.add(topic)
            logger.warning(message)

    def check_is_due(self, roles: tuple[str, ...]) -> bool:
        """Return whether to check this kind of tail now: the 1st, 2nd, 4th, 8th … time."""
        count = self._tails.get(roles, 0) + 1
        self._tails[roles] = count
        return count & (count - 1) == 0

    def effort(self, name: str | None) -> float | None:
        """Return the reasoning effort of a request for the renderer, if it takes one."""
        return None if name is None or not self._takes_effort else EFFORTS.get(name)

    def build(
        self, conversation: list[Message], effort: float | None
    ) -> list[tinker.ModelInputChunk]:
        """Render a whole conversation, with the opening of the next reply."""
        options: dict[str, Any] = {} if effort is None else {"effort": effort}
        return self.renderer.build_generation_prompt(conversation, **options).chunks

    def verify(self, tail: PromptTail, conversation: list[Message], effort: float | None) -> bool:
        """Check that the rendered conversation ends like a tail.

        A custom renderer may claim the extension property and still render a message by
        its place in the conversation. Then prompts of this dataset are no longer extended.
        """
        whole = flatten(self.build(conversation, effort))
        expected = flatten(tail.chunks)
        if whole[len(whole) - len(expected) :] == expected:
            return True
        self.extends = False
        self.warn_once(
            "extension",
            f"{type(self.renderer).__name__} says that prompts extend each other, but it "
            "renders new messages by what stands before them. Every prompt is rendered as a "
            "whole, and a trajectory becomes several datums.",
        )
        return False


class _ImageProcessor:
    """The image processor of a model, loaded with the first image: most tasks have none."""

    def __init__(self, model: str) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            processor = get_image_processor(self._model)
        except Exception as error:  # each hub and format raises its own errors
            reason = internals.in_one_line(error)
            raise RendererError(
                f"the image processor of {self._model} cannot be loaded: {reason:.300}"
            ) from error
        return getattr(processor, name)


def with_image_processor(renderer: Renderer) -> Renderer:
    """Return a vision renderer with its model's image processor, and any other as it is."""
    model = getattr(renderer, "_model_name", None)  # set by get_renderer(), for pickling
    if model is None or getattr(renderer, "image_processor", model) is not None:
        return renderer
    return copy_with(renderer, image_processor=_ImageProcessor(model))


def carries_images(renderer: Renderer) -> bool:
    """Return whether a renderer takes images; text renderers drop them without a word."""
    if getattr(renderer, "image_processor", None) is not None:
        return True
    return type(renderer).__name__ == "TmlV0Renderer"
