"""The model under training as Inspect sees it: a provider whose every call is parked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, partial
from logging import getLogger
from typing import Any, TypeVar

from inspect_ai.event import SampleLimitEvent
from inspect_ai.model import (
    ChatMessage,
    GenerateConfig,
    Model,
    ModelAPI,
    ModelInfo,
    ModelName,
    ModelOutput,
    ModelUsage,
    StreamEvent,
    get_model,
    modelapi,
    set_model_info,
)
from inspect_ai.tool import Tool, ToolCall, ToolChoice, ToolDef, ToolInfo, ToolSource
from inspect_ai.util import LimitExceededError

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.episodes import TurnRequest
from inspect_tinker_plugin.contracts.errors import Cause, EpisodeError
from inspect_tinker_plugin.contracts.policy import (
    POLICY_MODEL,
    POLICY_NAME,
    POLICY_PROVIDER,
    SideModel,
    SideModelRefusedError,
    find_side_model,
    requested_model,
)
from inspect_tinker_plugin.episode import fast_paths
from inspect_tinker_plugin.episode.boundaries import Stamp, enclose, running_boundaries, stamp
from inspect_tinker_plugin.episode.mailbox import Mailbox
from inspect_tinker_plugin.inspect_internals import (
    bridge_dialect,
    record_event,
)

logger = getLogger(__name__)

POLICY_CONFIG = {
    # Inspect's connection pool holds a place while a call is parked. A thousand parked
    # episodes need a thousand places, and the adaptive controller stops at a hundred.
    "max_connections": 1_000_000,
    "adaptive_connections": False,
    "timeout": None,
    "attempt_timeout": None,
    "stream_idle_timeout": None,
    "max_retries": None,
    "batch": None,
    "cache": None,
}
"""How calls reach the policy, whatever a task says: nothing of this is asked of the model."""

_untrained: ContextVar[bool] = ContextVar("inspect_rl_untrained", default=False)
_scoring: ContextVar[str | None] = ContextVar("inspect_rl_scoring", default=None)
_missing_role: ContextVar[str | None] = ContextVar("inspect_rl_missing_role", default=None)


class PolicyGradingError(RuntimeError):
    """A scorer asked the model under training for output.

    Attributes:
        role: the model role that the scorer looked for, if it looked for one.
    """

    def __init__(self, scorer: str, role: str | None) -> None:
        wanted = role or "grader"
        super().__init__(
            f"scorer {scorer!r} asked the model under training to grade"
            + (f" (it looked for the model role {role!r}, which is not set)" if role else "")
            + f". Set a grader: model_roles={{{wanted!r}: 'provider/model'}}"
            + ", or give the scorer a model of its own."
        )
        self.role = role


class RequestRefusedError(Exception):
    """A program asked the model under training for what cannot be honoured; shown as a 400."""

    status_code = 400

    def __init__(self, why: EpisodeError) -> None:
        super().__init__(*why.args)


class RoleBook(dict[str, Any]):
    """Model roles of a task; warns about roles that were asked for but are not set."""

    def __init__(self, roles: Mapping[str, Any], *, task: str) -> None:
        super().__init__(roles)
        self._task = task
        self._warned_of: set[str] = set()

    def __bool__(self) -> bool:
        """Return true even when empty: Inspect would replace an empty mapping by a plain dict."""
        return True

    def get(self, key: str, default: Any = None) -> Any:
        """Return the model of a role; note the role when it is not set."""
        if key in self:
            return super().get(key)
        _missing_role.set(key)
        is_refused = _scoring.get() is not None  # when it is asked
        if key not in self._warned_of and not is_refused:
            self._warned_of.add(key)
            logger.warning(
                "task %r asks for the model role %r, which is not set: unless the task has a "
                "default for it, the model under training plays it, as in an eval, and what it "
                "says there is trained with the reward of the whole episode. Set the role to keep "
                "it apart: model_roles={%r: 'provider/model'}, or --model-role %s=provider/model",
                self._task,
                *[key] * 3,
            )
        return default


@contextmanager
def scoring(name: str) -> Iterator[None]:
    """Mark everything inside as a scorer's work, which must not ask the policy."""
    scorer_token = _scoring.set(name)
    role_token = _missing_role.set(None)
    try:
        yield
    except internals.PrerequisiteError as error:
        if _missing_role.get() is not None:  # Inspect refuses a role that is required
            stamp(error, Cause.JUDGE)
        raise
    finally:
        _missing_role.reset(role_token)
        _scoring.reset(scorer_token)


@cache
def window_name(window: int) -> str:
    """Register a context window with Inspect, in tokens, and return the name that it is found by.

    Windows differ by dataset, while the policy has one name in all of them.
    """
    name = f"{POLICY_MODEL}/{window}"
    set_model_info(name, ModelInfo(context_length=window))
    return name


class PolicyAbsentError(RuntimeError):
    """The model under training was asked for output where there is no training."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{POLICY_PROVIDER}/{name} is the model under training of a log of rollouts, which can "
            "only be asked while it is trained. Name another model: --model NAME, or --model-role "
            "grader=NAME for a judge."
        )


class PlayingAPI(ModelAPI):
    """A provider that plays the policy, or passes calls on to the one that does."""

    count_text: Callable[[str], int] | None = None
    """Counts the tokens of a text as the policy's tokenizer does, where it is at hand."""

    @property
    def plays_policy(self) -> bool:
        """Whether it answers as the policy of an episode, or of an eval that is compared to one."""
        return True

    def _playing(self) -> Any:
        """Return the provider that answers: this, or that of the running episode or eval."""
        model = None if self.plays_policy else internals.active_model()
        return model.api if model and getattr(model.api, "plays_policy", False) else self

    async def count_text_tokens(self, text: str) -> int:
        """Count with the policy's tokenizer; without one, estimate four characters per token.

        Inspect's default downloads an encoding on first use. Compaction starts from this count;
        after the first reply it uses the usage of the replies, which is exact.
        """
        if (playing := self._playing()) is not self:
            counted: int = await playing.count_text_tokens(text)
            return counted
        return len(text) // 4 + 1 if self.count_text is None else self.count_text(text)


class PolicyAPI(PlayingAPI):
    """Parks each ``generate()`` in a mailbox until the environment answers it.

    Without a mailbox it is the provider of a model that was named as the policy: by
    ``get_model(str(state.model))``, or by ``get_model()`` while a task was made. It asks the policy
    of the running episode. It also bears the name that logs of rollouts give the model under
    training, so that Inspect can score them; the arguments that they give it have no effect then.

    Attributes:
        graded: The refusal of the last scorer that asked it, which may have told nobody.
    """

    def __init__(
        self,
        model_name: str = POLICY_NAME,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 - Inspect's own signature
        *,
        mailbox: Mailbox | None = None,
        max_turns: int | None = None,
        **logged: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config)
        self.attach(mailbox, max_turns=max_turns)

    def attach(self, mailbox: Mailbox | None, *, max_turns: int | None) -> None:
        """Serve a new episode: its mailbox, its limit, and counts from zero."""
        self._mailbox = mailbox
        self._max_turns = max_turns
        self.asked = 0
        self.answered = 0
        self._usage: ModelUsage | None = None
        self.truncated = False
        self.graded: PolicyGradingError | None = None

    @property
    def usage(self) -> ModelUsage:
        """What its replies have used, added up."""
        return ModelUsage() if self._usage is None else self._usage

    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput:
        """Wait for the policy's output.

        Raises:
            PolicyGradingError: The call comes from a scorer.
            PolicyAbsentError: There is no training.
            LimitExceededError: The episode has made ``max_turns`` calls.
        """
        scorer = _scoring.get()
        if scorer is not None:
            self.graded = PolicyGradingError(scorer, _missing_role.get())
            stamp(self.graded, Cause.JUDGE)
            raise self.graded
        if self._mailbox is None:
            if (playing := self._playing()) is self:
                raise PolicyAbsentError(self.model_name)
            reply: ModelOutput = await playing.generate(input, tools, tool_choice, config)
            return reply
        await self._check_turns(self._mailbox)
        request = TurnRequest(
            index=self.asked,
            messages=input,
            tools=tools,
            tool_choice=tool_choice,
            config=config,
            dialect=bridge_dialect(),
            side=_untrained.get(),
        )
        self.asked += 1
        answer = await self._mailbox.ask(request)
        if isinstance(answer, Exception):
            stamp(answer, Cause.POLICY)
            raise answer
        stop_reason = answer.stop_reason if answer.choices else None
        if stop_reason == "model_length":  # nobody has sampled it
            return answer
        self.answered += 1
        self.truncated = stop_reason == "max_tokens"
        calls = answer.message.tool_calls if answer.choices else None
        if calls and (boundaries := running_boundaries()):
            boundaries.policy_calls.update(call.id for call in calls)
        if answer.usage is not None:
            used = self._usage
            self._usage = answer.usage.model_copy() if used is None else used + answer.usage
        return answer

    @property
    def plays_policy(self) -> bool:
        """Whether an episode is served; without a mailbox, the running one's provider answers."""
        return self._mailbox is not None

    async def _check_turns(self, mailbox: Mailbox) -> None:
        limit = self._max_turns
        if limit is None or self.asked < limit:
            return
        await mailbox.turn()  # of several calls at once, those within the limit are answered
        message = f"The episode has made its {limit:,} model calls (max_turns)."
        record_event(SampleLimitEvent(type="turn", limit=limit, message=message))
        raise LimitExceededError("turn", value=self.asked + 1, limit=limit, message=message)

    window: int | None = None
    """Tokens that the policy takes, prompt and reply together, if that is known."""

    def input_tokens_name(self) -> str:
        """Return the name that Inspect finds the context window by: compaction is a part of it."""
        if (playing := self._playing()) is not self:
            return str(playing.input_tokens_name())
        return super().input_tokens_name() if self.window is None else window_name(self.window)

    def connection_key(self) -> str:
        """One connection pool for all episodes, without a limit."""
        return "inspect-rl-policy"


@modelapi(name=POLICY_PROVIDER)
def _policy_provider() -> type[ModelAPI]:
    return PolicyAPI


class MergedConfigs:
    """The last generation options that a task's episodes asked for, merged with the task's.

    Merging takes a noticeable part of a model call; most calls ask for the same options, and
    the task's options never change.
    """

    def __init__(self) -> None:
        self._last: tuple[GenerateConfig, str, GenerateConfig] | None = None

    def merge(
        self, asked: GenerateConfig, merge: Callable[[GenerateConfig], GenerateConfig]
    ) -> GenerateConfig:
        """Return the merged options; the caller may change ``asked`` afterwards."""
        # 1 and True are equal, and not the same in JSON.
        free = repr((asked.extra_body, asked.response_schema))
        if self._last is None or self._last[:2] != (asked, free):
            self._last = asked.model_copy(deep=True), free, merge(asked)
        return self._last[2]


T = TypeVar("T")

NO_PLACE = object()
"""What a call holds that needs no place in a pool of connections."""

_NO_OPTIONS = GenerateConfig()


class PolicyModel(Model):
    """The active model of an episode.

    Options that make sense for a provider behind a network are taken out of its
    configuration: time-outs (the trainer may take as long as it likes), retries, caching
    (every reply must be sampled) and connection limits. A task's own settings for them
    still reach every other model.
    """

    merged: MergedConfigs
    side_models: Mapping[str, SideModel] = {}
    metrics: dict[str, float | int]
    """Those of its episode; what programs asked of other models is counted there."""

    fast = False
    """Whether its calls may take the fast path."""
    keep_events = True
    """Whether the events of its calls are for a log."""
    _own: GenerateConfig | None = None
    """Its own options, which episodes do not share; most never ask for them."""

    @property
    def config(self) -> GenerateConfig:
        """Its own options. It has none, unless a solver sets some."""
        if self._own is None:
            self._own = GenerateConfig()
        return self._own

    @config.setter
    def config(self, options: GenerateConfig) -> None:
        self._own = options

    def _resolve_config(self, config: GenerateConfig | None) -> GenerateConfig:
        asked = config or GenerateConfig()
        own = self._own is not None and self._own != _NO_OPTIONS
        if own or self is not internals.active_model():  # a role's copy has no options of the task
            return self._merge_config(asked)
        known = self.merged.merge(asked, self._merge_config)
        # Without a log and anybody who looks at the call, nothing writes to it.
        shared = self.fast and not self.keep_events and not internals.somebody_watches_model_calls()
        return known if shared else known.model_copy()

    def _merge_config(self, asked: GenerateConfig) -> GenerateConfig:
        return super()._resolve_config(asked).model_copy(update=POLICY_CONFIG)

    # Plain functions: each coroutine on the way to a parked call is kept by every waiting episode.

    def generate(
        self,
        input: str | list[ChatMessage],
        tools: Sequence[Tool | ToolDef | ToolInfo | ToolSource] | ToolSource = (),
        tool_choice: ToolChoice | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 - Inspect's own signature
        cache: object = False,
        on_stream: Callable[[StreamEvent], Awaitable[None]] | None = None,
    ) -> Coroutine[Any, Any, ModelOutput]:
        """Generate without the cache, or have ``side_models`` answer.

        Raises:
            SideModelRefusedError: A program asked for a model that is refused.
        """
        ask_policy = partial(
            super().generate,
            *(input, tools, tool_choice, config),
            cache=False,
            on_stream=on_stream,
        )
        rule = find_side_model(self.side_models, requested_model.get())
        return ask_policy() if rule is None else self._generate_aside(rule, ask_policy)

    async def _generate_aside(
        self, rule: SideModel, ask_policy: partial[Coroutine[Any, Any, ModelOutput]]
    ) -> ModelOutput:
        counter = f"side_models/{rule.how}"
        self.metrics[counter] = self.metrics.get(counter, 0) + 1
        if rule.how == "refuse":
            raise SideModelRefusedError(f"The model {requested_model.get()!r} does not exist.")
        if rule.how == "reply":
            return ModelOutput.from_content(POLICY_MODEL, rule.what)
        if rule.how == "role":
            return await get_model(role=rule.what, required=True).generate(*ask_policy.args)
        token = _untrained.set(rule.how == "policy")
        try:
            return await ask_policy()
        finally:
            _untrained.reset(token)

    def _connection_concurrency(self, config: GenerateConfig) -> Any:
        """Give a place in the pool of connections, or :data:`NO_PLACE` on the fast path."""
        if self.fast and not internals.somebody_watches_model_calls():
            return nullcontext(NO_PLACE)
        return super()._connection_concurrency(config)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """Make one call, on the fast path when it holds no place in the pool."""
        if kwargs.get("connection") is not NO_PLACE or kwargs.get("on_stream") is not None:
            return super()._generate(*args, **kwargs)
        messages, definitions, tools, tool_choice = kwargs["prepared"]
        return fast_paths.ask_policy(
            self, messages, definitions, tools, tool_choice, kwargs["config"]
        )


def enclose_tool(name: str, call: Awaitable[Any]) -> Awaitable[Any]:
    """Stamp what a tool raises.

    Inspect runs each in a task of its own, in which ``SystemExit`` would end the loop.
    """
    return enclose(Cause.TOOL, f"the tool {name!r}", call)


def note_refused(call: ToolCall, error: Exception) -> None:
    """Stamp what is raised of arguments that cannot be converted, if the policy gave them."""
    boundaries = running_boundaries()
    if boundaries is not None and call.id in boundaries.policy_calls:
        boundaries.stamp(error, Stamp(Cause.ARGUMENTS, f"arguments of the tool {call.function!r}"))


def enclose_model(model: Model, call: partial[Coroutine[Any, Any, Any]]) -> Awaitable[Any]:
    """Stamp what a model other than the policy raises: it is a judge, or plays another part.

    One that was named as the policy is called as the policy is.
    """
    if isinstance(model, PolicyModel):
        return call()
    if isinstance(model.api, PolicyAPI):
        return _named_policy(model, model.api).generate(*call.args[1:], **call.keywords)
    return enclose(Cause.JUDGE, f"{model}", call())


def _named_policy(model: Model, api: PolicyAPI) -> PolicyModel:
    """Make a policy with the options of a model that Inspect has made by the policy's name."""
    policy = _copy_object(_templates()[0])
    policy.api, policy.config, policy.merged = api, model.config, MergedConfigs()
    if model.role is not None:
        policy._set_role(model.role)
    return policy


@cache
def _templates() -> tuple[PolicyModel, PolicyAPI]:
    """Make a model and a provider to copy: a new one would look for notebooks every time."""
    make: Callable[..., ModelAPI] = _policy_provider
    api = make(POLICY_NAME, mailbox=Mailbox())
    assert isinstance(api, PolicyAPI)
    api.qualified_model_name = POLICY_MODEL
    model = PolicyModel(api, _NO_OPTIONS)
    del model._own
    return model, api


@cache
def policy_name() -> ModelName:
    """Return the name of the policy, as states have it."""
    return ModelName(_templates()[0])


def _copy_object(template: T) -> T:
    """Copy an object; unlike ``copy.copy()``, its attributes take no dictionary of their own."""
    made = object.__new__(type(template))
    for name, value in vars(template).items():
        setattr(made, name, value)
    return made


def policy_model(
    mailbox: Mailbox,
    *,
    max_turns: int | None,
    merged: MergedConfigs,
    keep_events: bool,
    side_models: Mapping[str, SideModel] | None = None,
) -> tuple[PolicyModel, PolicyAPI]:
    """Make the policy of one episode, and the provider behind it that keeps the counts."""
    template, api_template = _templates()
    model, api = _copy_object(template), _copy_object(api_template)
    api.attach(mailbox, max_turns=max_turns)
    model.api, model.merged, model.metrics = api, merged, {}
    model.side_models = side_models or {}
    model.keep_events = keep_events
    model.fast = fast_paths.are_on() and internals.knows_model_calls()
    return model, api
