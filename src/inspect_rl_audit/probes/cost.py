"""Cost: what the task's episodes spend, determined before a run spends it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from inspect_rl_audit.attempts import ModelAttempt
from inspect_rl_audit.contract import AuditContext, finding
from inspect_rl_audit.findings import Finding
from inspect_rl_audit.plan import EpisodeCost, plan_of
from inspect_tinker_plugin.contracts.wording import counted


@dataclass(frozen=True)
class Cost:
    """Reports the cost of episodes, from a real model's attempts or estimated from scripts."""

    async def __call__(self, audit: AuditContext) -> Sequence[Finding]:
        options = audit.options
        attempts: Sequence[ModelAttempt] = options.attempts if options else ()
        cost = _counted(attempts) if attempts else _estimated(audit)
        if cost is None:
            return []
        plan = plan_of(
            cost,
            samples=len(audit.samples),
            group_size=options.group_size if options else 8,
            prices=options.prices if options else None,
        )
        audit.figures["cost"] = plan
        one = plan["per_episode"]
        kind = "counted" if cost.exact else "estimated from scripted episodes"
        message = (
            f"Per episode ({kind}): {counted(round(one['turns'], 3), 'turn')}, "
            f"{counted(round(one['prefilled']), 'token')} prefilled, "
            f"{one['cached']:,.0f} cached, {one['sampled']:,.0f} sampled, "
            f"{one['trained']:,.0f} trained, {one['sandbox_seconds']:g} s of sandbox."
        )
        if "money_in_all" in plan:
            message += f" One pass in groups of {plan['group_size']}: {plan['money_in_all']:,.2f}."
        return [finding("cost", message, evidence={"plan": plan})]


def _counted(attempts: Sequence[ModelAttempt]) -> EpisodeCost:
    cached, read = [], []
    for each in attempts:
        own = each.cached_tokens or _seen_before(each.input_tokens, each.turns)
        cached.append(own)
        read.append(each.input_tokens - own)
    return EpisodeCost(
        turns=statistics.fmean([each.turns for each in attempts]),
        prefilled=statistics.fmean(read),
        cached=statistics.fmean(cached),
        sampled=statistics.fmean([each.output_tokens for each in attempts]),
        trained=statistics.fmean(
            [
                each.trained_tokens
                if each.trained_tokens is not None
                else read[n] + each.output_tokens
                for n, each in enumerate(attempts)
            ]
        ),
        sandbox_seconds=statistics.fmean([each.sandbox_seconds for each in attempts]),
        seconds=statistics.fmean([each.seconds for each in attempts]),
        exact=True,
    )


def _seen_before(read: float, turns: int) -> float:
    """Return the prompt tokens that an earlier prompt held, for an append-only episode.

    With prompts that grow evenly from p to n·p their sum is p·n(n+1)/2 and the last is n·p.
    """
    return read * (1 - 2 / (turns + 1)) if turns > 1 else 0.0


def _estimated(audit: AuditContext) -> EpisodeCost | None:
    """Estimate from the honest policies; a real model writes more than they do."""
    records = [r for r in audit.reference.gold.values() if r.turns] or [
        r for r in audit.reference.null.values() if r.turns
    ]
    if not records:
        return None
    cached = [_seen_before(r.input_tokens, r.turns) for r in records]
    read = [r.input_tokens - c for r, c in zip(records, cached, strict=True)]
    sampled = [float(r.output_tokens) for r in records]
    return EpisodeCost(
        turns=statistics.fmean([float(r.turns) for r in records]),
        prefilled=statistics.fmean(read),
        cached=statistics.fmean(cached),
        sampled=statistics.fmean(sampled),
        trained=statistics.fmean([a + b for a, b in zip(read, sampled, strict=True)]),
        sandbox_seconds=statistics.fmean([r.seconds for r in records])
        if any(r.notes.get("scorer_did") for r in records)
        else 0.0,
        seconds=statistics.fmean([r.seconds for r in records]),
        judge_tokens=statistics.fmean([float(r.judge_tokens) for r in records]),
    )
