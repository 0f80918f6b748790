"""The cookbook's budgets and policies for single turns of an episode."""

from __future__ import annotations

from inspect_ai.model import ModelOutput
from tinker_cookbook.rl.rollout_limits import ParseErrorPolicy
from tinker_cookbook.rl.types import PARSE_ERROR_MASKED_METRIC_KEY, Metrics, StopReason


class TurnRules:
    """Counts tool calls and malformed calls of one episode, and decides when it must end.

    Attributes:
        stop: Why the episode must end, once a rule says so.
    """

    def __init__(self) -> None:
        self.stop: StopReason | None = None
        self._calls_left: int | None = None
        self._policy: ParseErrorPolicy | None = None
        self._malformed_in_a_row = 0

    def allow_tool_calls(self, budget: int) -> None:
        """Set the budget of tool calls."""
        self._calls_left = budget

    def apply(self, policy: ParseErrorPolicy) -> None:
        """Set the policy for malformed tool calls."""
        self._policy = policy

    def count(self, reply: ModelOutput) -> Metrics:
        """Count a reply's tool calls; return the metrics of its turn."""
        calls = reply.message.tool_calls or []
        metrics: Metrics = {"tools/calls": len(calls)} if calls else {}
        if not any(call.parse_error for call in calls):
            self._malformed_in_a_row = 0
            return metrics
        metrics["parse_error"] = 1.0
        self._malformed_in_a_row += 1
        if self._policy is not None and self._policy.mask_error_turns:
            metrics[PARSE_ERROR_MASKED_METRIC_KEY] = 1.0
        return metrics

    def refuse(self, reply: ModelOutput) -> str | None:
        """Return why a counted reply must not reach the solver, ``None`` when it may.

        A reply with more calls than are left is cut to the budget: those calls are carried
        out, and the episode ends before the next turn.
        """
        if self._policy is not None and self._malformed_in_a_row > self._policy.max_consecutive:
            self.stop = StopReason.PARSE_ERROR
            return "too many malformed tool calls in a row"
        calls = reply.message.tool_calls
        if self._calls_left is None or not calls:
            return None
        if self._calls_left == 0:
            self.stop = StopReason.MAX_TOOL_CALLS
            return "the budget of tool calls is used up"
        if len(calls) > self._calls_left:
            reply.message.tool_calls = calls[: self._calls_left]
            self.stop = StopReason.MAX_TOOL_CALLS
        self._calls_left -= min(len(calls), self._calls_left)
        return None

    def turn_reward(self, metrics: Metrics) -> float:
        """Return the reward of a turn that did not end the episode."""
        if self._policy is None or "parse_error" not in metrics:
            return 0.0
        return -self._policy.penalty_per_error

    def flat_reward(self) -> float | None:
        """Return the reward that replaces the episode's own: after too many malformed calls."""
        if self._policy is not None and self.stop is StopReason.PARSE_ERROR:
            return self._policy.terminal_reward
        return None
