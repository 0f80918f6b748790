"""What episodes say about a run: whether a real model's rewards differ, and what it costs."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from inspect_rl_audit.contract import TINY, AuditContext
from inspect_rl_audit.records import Finding, ModelAttempt, Severity, finding
from inspect_tinker_plugin.plugins import counted, part_of
from inspect_tinker_plugin.train import average_costs, plan_of

KEEP = "samples.txt"
"""File with the ids to train on, one per line, as ``--sample-id @FILE`` takes them: all samples
but those whose attempts all earned the same."""

_CUT = 0.1
_LISTED = 200

Rewards = Mapping[int | str, list[float]]
"""Rewards of attempts by their sample, or by their group."""


async def examine_signal(audit: AuditContext) -> Sequence[Finding]:
    """Examine attempts of a real model."""
    attempts = audit.options.attempts
    if not attempts:
        return []
    full = audit.reference.full
    by_sample: dict[int | str, list[float]] = defaultdict(list)
    by_group: dict[int | str, list[float]] = defaultdict(list)
    for each in attempts:
        # what a failed episode was given says nothing about its sample
        if each.reward is not None and not each.failed:
            by_sample[each.sample].append(each.reward)
            by_group[each.group].append(each.reward)
    flat = {id for id, rewards in _several(by_sample).items() if not _are_mixed(rewards)}
    keep = [sample.id for sample in audit.samples if sample.id not in flat]
    (audit.folder / KEEP).unlink(missing_ok=True)
    if keep and flat:
        text = "".join(f"{id}\n" for id in keep)
        (audit.folder / KEEP).write_text(text, encoding="utf-8")
    figures = _figures(attempts, by_sample, by_group, full)
    if by_sample:
        mixed = {id: rewards for id, rewards in by_sample.items() if id not in flat}
        advice = {**_recommend(mixed, attempts, full), "keep": len(keep), "drop": len(flat)}
        if keep and flat:
            advice["sample_ids_file"] = KEEP
        figures["recommendation"] = advice
    audit.figures["signal"] = figures
    return [
        *_find_flat(_several(by_group), attempts),
        *_find_extremes(_several(by_sample), attempts, full),
        *_examine_endings(attempts),
    ]


def _several(rewards: Rewards) -> Rewards:
    """Return those with more than one attempt."""
    return {id: own for id, own in rewards.items() if len(own) > 1}


def _are_mixed(rewards: Sequence[float]) -> bool:
    return max(rewards) - min(rewards) > TINY


def _find_solved(rewards: Sequence[float], full: float) -> list[bool]:
    return [reward >= full - TINY for reward in rewards]


def _figures(
    attempts: Sequence[ModelAttempt], by_sample: Rewards, by_group: Rewards, full: float
) -> dict[str, Any]:
    groups = _several(by_group).values()
    passed: dict[int, list[float]] = defaultdict(list)
    per_sample: dict[str, dict[str, float]] = {}
    for id, rewards in by_sample.items():
        chances = {k: pass_at(k, rewards, full) for k in (1, 2, 4, 8, 16, 32) if k <= len(rewards)}
        for k, chance in chances.items():
            passed[k].append(chance)
        if len(per_sample) < _LISTED:
            per_sample[str(id)] = {
                "attempts": len(rewards),
                "mean": round(statistics.fmean(rewards), 4),
                **{f"pass@{k}": round(chance, 4) for k, chance in chances.items()},
            }
    every = [reward for rewards in by_sample.values() for reward in rewards]
    solved = [_find_solved(rewards, full) for rewards in by_sample.values()]
    return {
        "attempts": len(attempts),
        "samples": len(by_sample),
        "mean_reward": round(statistics.fmean(every), 4) if every else None,
        "pass_at": {str(k): round(statistics.fmean(passed[k]), 4) for k in sorted(passed)},
        "groups": len(groups),
        "flat_groups": sum(not _are_mixed(rewards) for rewards in groups),
        "solved_by_all": sum(map(all, solved)),
        "solved_by_none": sum(not any(each) for each in solved),
        "turns": _spread([each.cost.turns for each in attempts]),
        "output_tokens": _spread([each.cost.sampled for each in attempts]),
        "stop_reasons": dict(Counter(each.stop for each in attempts).most_common()),
        "per_sample": per_sample,
    }


def pass_at(k: int, rewards: Sequence[float], full: float) -> float:
    """Return the unbiased estimate of the chance that one of k attempts earns the full reward."""
    n, solved = len(rewards), sum(_find_solved(rewards, full))
    if n - solved < k:
        return 1.0
    return 1.0 - math.comb(n - solved, k) / math.comb(n, k)


def _spread(values: Sequence[float]) -> dict[str, float]:
    ranked = sorted(values)
    return {
        "least": ranked[0],
        "median": ranked[len(ranked) // 2],
        "p90": ranked[int(0.9 * len(ranked))],
        "most": ranked[-1],
        "mean": round(statistics.fmean(ranked), 1),
    }


def _find_flat(by_group: Rewards, attempts: Sequence[ModelAttempt]) -> list[Finding]:
    flat = [name for name, rewards in by_group.items() if not _are_mixed(rewards)]
    if not by_group or 2 * len(flat) < len(by_group):
        return []
    shown = next(each for each in attempts if each.group == flat[0])
    on = part_of(len(flat), len(by_group), "group")
    message = f"{on} with one reward for all attempts: nothing is learned from them."
    severity = Severity.HIGH if len(flat) == len(by_group) > 1 else None
    return [finding("no-signal", message, shown, severity=severity)]


def _find_extremes(
    by_sample: Rewards, attempts: Sequence[ModelAttempt], full: float
) -> list[Finding]:
    all_solve = [id for id, rewards in by_sample.items() if all(_find_solved(rewards, full))]
    none_solve = [id for id, rewards in by_sample.items() if max(rewards) <= TINY]
    found = []
    for code, ids in (("solved-by-all", all_solve), ("solved-by-none", none_solve)):
        if ids:
            shown = [next(each for each in attempts if each.sample == id) for id in ids]
            names = ", ".join(map(str, ids[:10])) + (", …" if len(ids) > 10 else "")
            message = f"{part_of(len(ids), len(by_sample), 'sample')}: {names}"
            found.append(finding(code, message, shown))
    return found


def _examine_endings(attempts: Sequence[ModelAttempt]) -> list[Finding]:
    found = []
    cut = [each for each in attempts if "max_tokens" in each.stop or each.stop == "token limit"]
    if len(cut) > _CUT * len(attempts):
        message = f"Cut at a token limit: {part_of(len(cut), len(attempts), 'episode')}."
        found.append(finding("cut-replies", message, cut[0]))
    failed = [each for each in attempts if each.failed]
    if failed:
        message = f"{part_of(len(failed), len(attempts), 'episode')} failed."
        severity = None if len(failed) > _CUT * len(attempts) else Severity.LOW
        found.append(finding("failed-episodes", message, failed[0], severity=severity))
    return found


def _recommend(mixed: Rewards, attempts: Sequence[ModelAttempt], full: float) -> dict[str, Any]:
    """Recommend group size and reply length for a first run on samples whose rewards differ."""
    rates = [sum(_find_solved(rewards, full)) / len(rewards) for rewards in mixed.values()]
    rate = statistics.median(rates) if rates else 0.0  # where none differ, nothing is known
    flat = max(rate, 1 - rate)
    # the smallest group whose rewards differ nine times in ten: flat^G <= 0.1
    size = math.ceil(math.log(0.1) / math.log(flat)) if 0 < flat < 1 else 8
    replies = [max(1, each.cost.sampled // max(each.cost.turns, 1)) for each in attempts]
    return {
        "group_size": max(4, min(64, size)),
        "max_tokens": 64 * math.ceil(1.5 * _spread(replies)["p90"] / 64),
    }


async def report_cost(audit: AuditContext) -> Sequence[Finding]:
    """Report the cost of a real model's attempts; `inspect rl train --dry-run` estimates it."""
    options = audit.options
    if not options.attempts:
        return []
    costs = [each.cost for each in options.attempts]
    plan = plan_of(
        average_costs(costs, [1.0] * len(costs)),
        samples=len(audit.samples),
        group_size=options.group_size,
        prices=options.prices,
    )
    audit.figures["cost"] = plan
    one = plan["per_episode"]
    message = (
        f"Per episode: {counted(round(one['turns'], 3), 'turn')}, "
        f"{counted(round(one['prefilled']), 'token')} prefilled, "
        f"{one['cached']:,.0f} cached, {one['sampled']:,.0f} sampled, "
        f"{one['trained']:,.0f} trained, {one['sandbox_seconds']:g} s of sandbox."
    )
    if "money_in_all" in plan:
        message += f" One pass in groups of {plan['group_size']}: {plan['money_in_all']:,.2f}."
    return [finding("cost", message, plan=plan)]
