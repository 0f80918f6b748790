"""Runs one sample on one side of the parity contract.

The sides are `inspect_ai.eval`, an episode, and a cookbook rollout: rendered prompts in, sampled
tokens out.
"""

from __future__ import annotations

import asyncio
import copy
import os
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from inspect_ai import Epochs, Task, eval_async
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog, read_eval_log_async
from inspect_ai.solver import Solver
from inspect_ai.util import SandboxEnvironmentType, display_type

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.episodes import EpisodeResult, TurnRequest
from inspect_tinker_plugin.contracts.errors import EpisodeError, RendererError
from inspect_tinker_plugin.episode.runner import Episode, EpisodeRunner
from inspect_tinker_plugin.episode.task import resolve_roles
from inspect_tinker_plugin.options import EpisodeOptions
from inspect_tinker_plugin.tasks.loading import find_providers, with_policy
from inspect_tinker_plugin.tasks.samples import with_id, with_samples
from inspect_tinker_plugin.testing.policy import ScriptedPolicy, load_renderer
from inspect_tinker_plugin.testing.replies import (
    Player,
    Script,
    ScriptedAPI,
    ScriptExhausted,
    recording,
    scripted_model,
)
from inspect_tinker_plugin.testing.traces import Trace, trace_of_log, trace_of_result

if TYPE_CHECKING:
    from inspect_ai.model import Model, ModelOutput
    from tinker_cookbook.completers import TokenCompleter
    from tinker_cookbook.renderers import Renderer

    from inspect_tinker_plugin.tokens.episode import EpisodeTokens

TaskSource: TypeAlias = Task | Callable[[], Task]
"""A task, or what makes it: state that a task keeps must not leak between the sides."""

T = TypeVar("T")

TIMEOUT = 600.0
"""Seconds that one run of a sample may take."""

GRACE = 20.0
"""Seconds for the clean-up of a run that is cancelled."""


class ParityError(RuntimeError):
    """A side could not be run to its end, so there is nothing to compare."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """How one sample is run; the same on every side."""

    sample: int | Sample = 0
    """The sample, or its position in the task's dataset."""

    options: EpisodeOptions = field(default_factory=EpisodeOptions)
    """How an episode is run; given to ``eval`` as its arguments."""

    ordered: bool = True
    """Whether the model calls come in a fixed order; not so for several coroutines at once."""

    solver: Callable[[], Solver] | None = None
    """Makes the solver that replaces the task's, once per run: solvers may keep state."""

    sandbox: SandboxEnvironmentType | Mapping[str, str] | None = None
    """Replaces the task's sandbox: a type that Inspect knows, or a plugin's provider."""

    renderer: str | Renderer = "qwen3_instruct"
    """Renderer of a rollout, or the name of one over the shipped tokenizer."""

    timeout: float | None = TIMEOUT
    """Seconds that one run may take."""


PLAIN = Conditions()


def make_task(source: TaskSource) -> Task:
    """Return the task itself, or a new one if there is a factory."""
    if isinstance(source, Task):
        return source
    with with_policy():
        return source()


def one_sample_task(source: TaskSource, sample: int | Sample) -> Task:
    """Return a task whose only sample is the chosen one; the original is not changed.

    Both sides get the very same sample, even if the task's dataset is in another order
    each time that it is made.
    """
    task = make_task(source)
    if isinstance(sample, int):
        sample = with_id(task.dataset[sample], sample)
    return with_samples(task, [copy.deepcopy(sample)])


def replace_sandbox(
    task: Task, sandbox: SandboxEnvironmentType | Mapping[str, str] | None
) -> tuple[Task, SandboxEnvironmentType | None]:
    """Return the task and the sandbox to give to ``eval()``, which knows no plugin's providers.

    These are put into the task and its samples.
    """
    mapping = find_providers(sandbox)
    if mapping is None:
        return task, cast("SandboxEnvironmentType | None", sandbox)
    spec = internals.resolve_task_sandbox(task, None)
    mapped = with_samples(
        task,
        [
            sample
            if sample.sandbox is None
            else sample.model_copy(update={"sandbox": mapping(sample.sandbox)})
            for sample in task.dataset
        ],
    )
    mapped.sandbox = None if spec is None else mapping(spec)
    return mapped, None


def make_runner(task: Task, how: Conditions, *, keep_log: bool) -> EpisodeRunner:
    """Make the runner of a side's episode."""
    return EpisodeRunner(
        task,
        options=how.options,
        solver=None if how.solver is None else how.solver(),
        sandbox=how.sandbox,
        keep_log=keep_log,
    )


async def run_eval(source: TaskSource, script: Script, how: Conditions = PLAIN) -> Trace:
    """Run one sample, for one epoch, through ``inspect_ai.eval``, its log read back."""
    if how.options.max_turns is not None:
        raise ParityError(
            "max_turns has no counterpart in an eval (its turn limit makes one call more and "
            "drops the answer): compare with Task(turn_limit=...) instead"
        )
    model = scripted_model(script, name="policy")
    assert isinstance(model.api, ScriptedAPI)
    assert model.api.player is not None
    with recording() as others:
        log = await wait_for_run(
            _eval(one_sample_task(source, how.sample), model, how), how.timeout, model.api.player
        )
    if not log.samples:
        reason = f"status {log.status}"
        if log.error is not None:
            reason = internals.without_markup(log.error.message)
        raise ParityError(f"inspect_ai.eval ran no sample of task {log.eval.task!r}: {reason}")
    return trace_of_log(log.samples[0], policy=model.api.player, others=others, ordered=how.ordered)


def eval_arguments(options: EpisodeOptions) -> dict[str, Any]:
    """Return the options of an episode as arguments of ``eval()``: judges, limits, scoring."""
    return {
        "model_roles": resolve_roles({}, options.model_roles) or None,
        "message_limit": options.message_limit,
        "token_limit": options.token_limit,
        "time_limit": options.time_limit,
        "working_limit": options.working_limit,
        "cost_limit": options.cost_limit,
        "score_on_error": options.score_on_error or None,
        **(
            {}
            if options.sentinel is None
            else {"sentinel": internals.resolve_sentinel(options.sentinel)[0]}
        ),
    }


async def _eval(task: Task, model: Model, how: Conditions) -> EvalLog:
    os.environ.setdefault("INSPECT_DISPLAY", "none")
    display_type()
    task, sandbox = replace_sandbox(task, how.sandbox)
    with tempfile.TemporaryDirectory(prefix="parity-") as log_dir:
        [written] = await eval_async(
            task,
            model=model,
            solver=None if how.solver is None else how.solver(),
            sandbox=sandbox,
            epochs=Epochs(1, "mean"),  # the task's own reducer may need more
            log_dir=log_dir,
            log_realtime=False,
            fail_on_error=False,
            **eval_arguments(how.options),
        )
        return await read_eval_log_async(written.location, resolve_attachments="full")


async def run_episode(source: TaskSource, script: Script, how: Conditions = PLAIN) -> Trace:
    """Run one sample as an episode, its model calls answered with messages (no tokens)."""
    with recording() as others:
        task = one_sample_task(source, how.sample)
        runner = make_runner(task, how, keep_log=True)
        player = Player(script)
        result = await wait_for_run(play(runner, task.dataset[0], player), how.timeout, player)
        return trace_of_result(result, policy=player, others=others, ordered=how.ordered)


async def wait_for_run(work: Coroutine[Any, Any, T], timeout: float | None, player: Player) -> T:
    """Wait for a run, which is cancelled if it takes too long or does not end with its script."""
    run = asyncio.ensure_future(work)
    gave_up = asyncio.ensure_future(player.gave_up.wait())
    try:
        await asyncio.wait({run, gave_up}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if run.done():
            return run.result()
        if gave_up.done():
            raise ParityError("the task does not end when there is no reply; give it a script")
        raise ParityError(f"it did not end within {timeout:g} seconds")
    finally:
        # its sandboxes are removed before anything else is run
        run.cancel()
        gave_up.cancel()
        await asyncio.wait({run}, timeout=GRACE)


async def play(runner: EpisodeRunner, sample: Sample, player: Player) -> EpisodeResult:
    """Run one episode to its end with a player's replies."""
    episode = runner.episode(sample)
    try:
        outcome = await episode.start()
        while not isinstance(outcome, EpisodeResult):
            # the solver goes on to change these messages after they were answered
            seen = [message.model_copy(deep=True) for message in outcome.messages]
            try:
                answer = await player.answer(replace(outcome, messages=seen))
            except Exception as error:
                outcome = await episode.reply(error)
            else:
                outcome = await episode.reply(answer)
        return outcome
    finally:
        await episode.close()


async def run_rollout(source: TaskSource, script: Script, how: Conditions = PLAIN) -> Trace:
    """Run one sample through the env and the cookbook's rollout runner, with the script in tokens.

    No log is kept, as in most training: the fast paths that this allows are compared with.
    """
    with recording() as others:
        task = one_sample_task(source, how.sample)
        runner = make_runner(task, how, keep_log=False)
        player = Player(script)
        episode = runner.episode(task.dataset[0])
        renderer = how.renderer
        if isinstance(renderer, str):
            renderer = load_renderer(renderer)
        try:
            result = await wait_for_run(_roll(episode, player, renderer), how.timeout, player)
        except RendererError as error:
            raise ParityError(f"{error} The side of messages needs no renderer.") from error
        return trace_of_result(
            result, policy=player, others=others, ordered=how.ordered, events=episode.events
        )


async def _roll(episode: Episode, player: Player, renderer: Renderer) -> EpisodeResult:
    from inspect_tinker_plugin.tokens.episode import DatasetRenderer, EpisodeTokens

    asked: list[TurnRequest] = []

    class RecordingTokens(EpisodeTokens):
        """Records each request as it is rendered, before the solver changes it."""

        def prompt(self, request: TurnRequest) -> Any:
            seen = [message.model_copy(deep=True) for message in request.messages]
            asked.append(replace(request, messages=seen))
            return super().prompt(request)

        def parse(self, tokens: Any, *, stop_reason: Any, request: TurnRequest) -> ModelOutput:
            # the script says its replies whole in the eval, whatever their length
            config = request.config.model_copy(update={"max_tokens": None})
            return super().parse(
                tokens, stop_reason=stop_reason, request=replace(request, config=config)
            )

    policy = ScriptedPolicy(renderer, player.answer, request=lambda: asked[-1])
    tokens = RecordingTokens(
        DatasetRenderer(renderer), task=episode.prepared.name, sample_id=episode.sample.id
    )
    return await roll_to_end(episode, tokens, cast("TokenCompleter", policy))


async def roll_to_end(
    episode: Episode, tokens: EpisodeTokens, policy: TokenCompleter
) -> EpisodeResult:
    """Roll an episode out as the cookbook does, without a reward, and return its result.

    The part before an error, or before a script ran out, can still be compared.
    """
    from tinker_cookbook.rl import rollout_runner

    from inspect_tinker_plugin.contracts.errors import ErrorPolicy
    from inspect_tinker_plugin.rewards import Reward, resolve_reward
    from inspect_tinker_plugin.rl.ending import RewardRules
    from inspect_tinker_plugin.rl.env import InspectEnv

    async def no_reward(result: EpisodeResult) -> Reward:
        return Reward(0.0, {})

    outcomes = RewardRules(resolve_reward(no_reward), ErrorPolicy.of("raise"))
    env = InspectEnv(episode, tokens, outcomes)
    try:
        await rollout_runner.run_rollout(policy, env)
    except EpisodeError:
        if env.ending is None:
            raise
    except ScriptExhausted:
        await env.settle()
    finally:
        await env.close()
    assert env.ending is not None
    return env.ending.result
