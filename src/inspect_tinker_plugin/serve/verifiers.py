"""A task as a verifiers v1 taskset, which its commands, its env server and prime-rl load by name.

::

    # my_env.py, installed as a module
    from inspect_tinker_plugin.serve.verifiers import as_verifiers_taskset

    MyTaskset, MyHarness, MyEnv = as_verifiers_taskset("tasks.py@math")
    __all__ = ["MyEnv", "MyHarness", "MyTaskset"]

Tasks are the samples. The harness runs the episode in this process: what verifiers calls a runtime
and a tool server are Inspect's sandboxes and tools. Model calls go to the run's model server as
token ids, not through verifiers' interception server, which would render the conversation anew.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import aiohttp
from tinker_cookbook.rl.rollout_limits import RolloutLimits

from inspect_tinker_plugin.contracts.errors import Cause, ConfigError
from inspect_tinker_plugin.contracts.wording import missing_extra
from inspect_tinker_plugin.options import DatasetKeywords, DatasetOptions, read_keywords
from inspect_tinker_plugin.rl.dataset import TaskLike
from inspect_tinker_plugin.rl.models import make_renderer
from inspect_tinker_plugin.serve.results import Failure, RolloutResult, SampledTurn, write_message
from inspect_tinker_plugin.serve.samplers import Endpoint, EndpointSampler, Prompt, Sampled
from inspect_tinker_plugin.serve.service import RolloutService
from inspect_tinker_plugin.tasks.reference import resolve_task
from inspect_tinker_plugin.tasks.samples import select_samples

try:
    import verifiers.v1 as vf
    from verifiers.v1.configs.client import resolve_api_key, resolve_headers
    from verifiers.v1.dialects import parse_message
except ImportError as error:
    raise ImportError(missing_extra("verifiers 0.4", "verifiers")) from error

OUTCOME = "inspect_rl"
"""Key of ``trace.info`` under which a result is."""

_ERRORS = {
    "sampler": vf.ProviderError,
    Cause.SANDBOX: vf.SandboxError,
    Cause.INSIDE_SANDBOX: vf.SandboxError,
    Cause.ARGUMENTS: vf.ToolsetError,
    Cause.TOOL: vf.ToolsetError,
    Cause.SOLVER: vf.HarnessError,
    Cause.POLICY: vf.HarnessError,
}
"""verifiers' error by cause; what fails in scoring is a ``TaskError``."""

_STOPS = {
    "max_tokens": "max_total_tokens",
    "max_sampled_tokens": "max_output_tokens",
    "context_overflow": "max_total_tokens",
}
"""Stop conditions that verifiers knows as truncations, by ours."""


class VerifiersPackage(NamedTuple):
    """What a module exports to be found by its name."""

    taskset: type[vf.Taskset[Any, Any]]
    harness: type[vf.Harness[Any]]
    env: type[vf.Env[Any]]


class InspectTask(vf.Task[vf.TaskData]):
    """One sample; its id is that of the sample."""

    @property
    def key(self) -> str:
        """The id of the sample, unique in its task."""
        return str(self.data.id)

    @vf.reward
    async def reward(self, trace: vf.Trace) -> float:
        """Return the reward of the episode.

        Raises:
            RuntimeError: There is none, because a deadline of verifiers cut the episode. Inspect's
                own limits (the option ``time_limit``) end an episode and score it.
        """
        outcome = trace.info.get(OUTCOME)
        if outcome is None:
            raise RuntimeError(
                f"the episode was cut ({trace.stop_condition}) and has no reward; the option "
                "time_limit ends an episode and scores it"
            )
        return float(outcome["reward"])


class InspectEnvConfig(vf.SingleAgentEnvConfig):
    """The environment's settings; the harness runs in this process."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class InspectEnv(vf.Env[InspectEnvConfig]):
    """One agent per episode: the task's solver."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Run the episode."""
        await agents.agent.run(task)


def as_verifiers_taskset(
    task: TaskLike,
    *,
    model: str | None = None,
    renderer: Any = None,
    task_args: Mapping[str, Any] | None = None,
    **options: Unpack[DatasetKeywords],
) -> VerifiersPackage:
    """Make what verifiers loads: a taskset of the samples, its harness and its environment.

    Args:
        task: As in ``as_rl_dataset``.
        model: The model that determines tokenizer and renderer; by default that of the run.
        renderer: Name of a cookbook renderer, or one; the model's recommended one by default.
        task_args: Arguments of the task function.
        options: As in ``as_rl_dataset``; those that choose samples choose the taskset's.

    Raises:
        ConfigError: The task or an option is not usable.
    """
    read = DatasetOptions(**read_keywords(options))
    if read.group_reward is not None:
        raise ConfigError(
            "group_reward compares the episodes of a group, and verifiers runs each by itself"
        )
    resolved = resolve_task(task, task_args, roles=read.model_roles)
    samples = select_samples(resolved.task, read.selection)
    services: dict[str | None, RolloutService] = {}

    def service_for(name: str | None) -> RolloutService:
        """Return the service for a model, made when its first episode begins."""
        if name not in services:
            made = renderer
            if made is None or isinstance(made, str):
                made = make_renderer(made, model=name)
            services[name] = RolloutService(task, made, task_args=task_args, **options)
        return services[name]

    class InspectTaskset(vf.Taskset[InspectTask, vf.TasksetConfig]):
        def load(self) -> Iterator[InspectTask]:
            for sample in samples:
                prompt = (
                    sample.input
                    if isinstance(sample.input, str)
                    else [parse_message(write_message(each)) for each in sample.input]
                )
                data = vf.TaskData(id=str(sample.id), name=resolved.task.name, prompt=prompt)
                yield InspectTask(data, self.config.task)

    class InspectHarness(vf.Harness[vf.HarnessConfig]):
        APPENDS_SYSTEM_PROMPT = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: vf.ModelContext,
            trace: vf.Trace,
            runtime: vf.Runtime,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: vf.TaskData,
            **_: Any,
        ) -> vf.ProgramResult:
            named = model or getattr(ctx.client, "renderer_model_name", None) or ctx.model
            service = service_for(named)
            server = _endpoint(ctx)
            writer = TraceWriter(trace, server)
            async with aiohttp.ClientSession() as session:
                result = await service.run_episode(
                    str(data.id),
                    writer.time_calls(EndpointSampler(server, session)),
                    limits=_limits(trace.agent.config, service),
                    on_turn=writer.add,
                )
            if result.failure is not None:
                raise _error(result.failure)
            _record(trace, result)
            return vf.ProgramResult(0, "", "")

    return VerifiersPackage(InspectTaskset, InspectHarness, InspectEnv)


def _endpoint(ctx: vf.ModelContext) -> Endpoint:
    """Read where and how the run samples."""
    sampling = ctx.sampling.model_dump(exclude_none=True)
    for name in ("reasoning_effort", "chat_template_kwargs", "cache_salt"):
        sampling.pop(name, None)
    return Endpoint(
        url=ctx.client.base_url,
        model=ctx.model,
        form="generate" if isinstance(ctx.client, vf.TrainClientConfig) else "completions",
        api_key=resolve_api_key(ctx.client),
        headers=resolve_headers(ctx.client),
        sampling=sampling,
    )


def _limits(agent: vf.AgentConfig, service: RolloutService) -> RolloutLimits | None:
    """Read the agent's budgets; ``None`` leaves those of the options.

    Raises:
        ConfigError: There is one that no runner knows.
    """
    if agent.max_input_tokens is not None:
        raise ConfigError("max_input_tokens: use max_total_tokens, or the option context_window")
    budgets = (agent.max_turns, agent.max_output_tokens, agent.max_total_tokens)
    if all(budget is None for budget in budgets):
        return None
    window = service.options.context_window
    totals = [each for each in (agent.max_total_tokens, window) if each is not None]
    return RolloutLimits(
        max_turns=agent.max_turns,
        max_sampled_tokens=agent.max_output_tokens,
        max_trajectory_tokens=min(totals, default=None),
    )


class TraceWriter:
    """Writes turns into a trace's message graph while the episode runs.

    A branch of the trace holds the tokens of one training sequence. A turn that continues none
    gets nodes of its own, whose earlier replies are not trained on again.
    """

    def __init__(self, trace: vf.Trace, server: Endpoint) -> None:
        self._trace = trace
        self._server = server
        self._ends: list[tuple[list[int], int, int]] = []
        """Of each branch: its tokens, its last node, and its number of messages."""
        self._spans: dict[int, vf.TimeSpan] = {}

    def time_calls(self, sampler: EndpointSampler) -> Any:
        """Return the sampler, noting when each call began and ended."""

        async def sample(prompt: Prompt) -> Sampled:
            start = time.time()
            sampled = await sampler(prompt)
            self._spans[id(prompt.tokens)] = vf.TimeSpan(start=start, end=time.time())
            return sampled

        return sample

    def add(self, turn: SampledTurn) -> None:
        """Add a turn, and let those who watch the trace know."""
        prompt = list(turn.prompt_tokens)
        known, parent, told = self._find_branch(prompt)
        tools = [] if parent is not None else [_tool(each) for each in turn.tools]
        new = [parse_message(write_message(each)) for each in turn.messages[told:]]
        scaffold = prompt[len(known) :]
        for number, message in enumerate(new):
            last = number == len(new) - 1
            parent = self._node(parent, message, scaffold if last else [], tools=tools)
            tools = []
        node = self._node(
            parent,
            parse_message(write_message(turn.reply)),
            [*([] if new else scaffold), *turn.tokens],
            sampled=turn,
        )
        self._ends.append(([*prompt, *turn.tokens], node, len(turn.messages) + 1))
        length = len(prompt)
        self._trace.calls.append(
            vf.ModelCall(
                node=node,
                model=self._server.model,
                endpoint=self._server.address,
                finish_reason="tool_calls" if turn.reply.tool_calls else turn.stop_reason,
                usage=vf.Usage(prompt_tokens=length, completion_tokens=len(turn.tokens)),
                time=self._spans.pop(id(turn.prompt_tokens), vf.TimeSpan()),
            )
        )
        self._trace.notify()

    def _find_branch(self, prompt: Sequence[int]) -> tuple[list[int], int | None, int]:
        """Take the longest branch that a prompt continues."""
        found = [end for end in self._ends if prompt[: len(end[0])] == end[0]]
        if not found:
            return [], None, 0
        end = max(found, key=lambda each: len(each[0]))
        self._ends.remove(end)
        return end

    def _node(
        self,
        parent: int | None,
        message: Any,
        tokens: Sequence[int],
        *,
        tools: Sequence[vf.Tool] = (),
        sampled: SampledTurn | None = None,
    ) -> int:
        count = len(sampled.tokens) if sampled is not None and sampled.trained else 0
        self._trace.nodes.append(
            vf.MessageNode(
                parent=parent,
                message=message,
                tools=list(tools),
                sampled=sampled is not None,
                token_ids=list(tokens),
                mask=[False] * (len(tokens) - count) + [True] * count,
                logprobs=list(sampled.logprobs) if sampled is not None and count else [],
            )
        )
        return len(self._trace.nodes) - 1


def _record(trace: vf.Trace, result: RolloutResult) -> None:
    trace.info[OUTCOME] = {
        "reward": result.reward,
        "scores": {name: dict(score) for name, score in result.scores.items()},
        "stop_reason": result.stop_reason,
        "policy_versions": sorted(
            {str(turn.policy_version) for turn in result.turns if turn.policy_version is not None}
        ),
    }
    trace.record_metrics({name: float(value) for name, value in result.metrics.items()})
    if result.stop_reason not in (None, "completed"):
        trace.stop(_STOPS.get(result.stop_reason, result.stop_reason))


def _error(failure: Failure) -> Exception:
    kind = _ERRORS.get(failure.cause, vf.TaskError)
    error: Exception = kind(failure.message)
    return error


def _tool(info: Any) -> vf.Tool:
    parameters = info.parameters.model_dump(mode="json", exclude_none=True)
    return vf.Tool(name=info.name, description=info.description, parameters=parameters)
