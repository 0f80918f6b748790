"""What episodes say about a run: whether a real model's rewards differ, and what it costs."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inspect_rl_audit.contract import TINY, AuditContext
from inspect_rl_audit.records import Finding, ModelAttempt, Severity, finding
from inspect_tinker_plugin.plugins import counted, part_of
from inspect_tinker_plugin.train import EpisodeCost, average_costs, plan_of

KEEP = "samples.txt"
"""File with the ids to train on, one per line, as ``--sample-id @FILE`` takes them: all samples
but those whose attempts all earned the same."""

_CUT = 0.1
_LISTED = 200


@dataclass(frozen=True)
class Signal:
    """Examines attempts of a real model."""

    async def __call__(self, audit: AuditContext) -> Sequence[Finding]:
        attempts: Sequence[ModelAttempt] = audit.options.attempts
        if not attempts:
            return []
        full = audit.reference.full
        # what a failed episode was given says nothing about its sample
        rewarded = [each for each in attempts if each.reward is not None and not each.failed]
        by_sample: dict[int | str, list[float]] = defaultdict(list)
        by_group: dict[str, list[float]] = defaultdict(list)
        for each in rewarded:
            assert each.reward is not None
            by_sample[each.sample].append(each.reward)
            by_group[each.group].append(each.reward)
        figures = _figures(attempts, by_sample, by_group, full)
        found = _find_flat(by_group, attempts)
        found += _find_extremes(by_sample, attempts, full)
        found += _examine_endings(attempts)
        flat = {id for id, rewards in by_sample.items() if len(rewards) > 1 and not _mixed(rewards)}
        keep = [sample.id for sample in audit.samples if sample.id not in flat]
        if rewarded:
            figures["recommendation"] = _recommend(by_sample, attempts, flat, len(keep), full)
        audit.figures["signal"] = figures
        (audit.folder / KEEP).unlink(missing_ok=True)
        if keep and flat:
            text = "".join(f"{id}\n" for id in keep)
            (audit.folder / KEEP).write_text(text, encoding="utf-8")
        return found


def _mixed(rewards: Sequence[float]) -> bool:
    return max(rewards) - min(rewards) > TINY


def _figures(
    attempts: Sequence[ModelAttempt],
    by_sample: Mapping[int | str, list[float]],
    by_group: Mapping[str, list[float]],
    full: float,
) -> dict[str, Any]:
    groups = [rewards for rewards in by_group.values() if len(rewards) > 1]
    most = max((len(rewards) for rewards in by_sample.values()), default=0)
    ks = [k for k in (1, 2, 4, 8, 16, 32) if k <= most]
    pass_by_k = {
        k: {id: pass_at(k, rewards, full) for id, rewards in by_sample.items() if len(rewards) >= k}
        for k in ks
    }
    per_sample = {
        str(id): {
            "attempts": len(rewards),
            "mean": round(statistics.fmean(rewards), 4),
            **{f"pass@{k}": round(pass_by_k[k][id], 4) for k in ks if k <= len(rewards)},
        }
        for id, rewards in list(by_sample.items())[:_LISTED]
    }
    solved = [[reward >= full - TINY for reward in rewards] for rewards in by_sample.values()]
    every = [reward for rewards in by_sample.values() for reward in rewards]
    return {
        "attempts": len(attempts),
        "samples": len(by_sample),
        "mean_reward": round(statistics.fmean(every), 4) if every else None,
        "pass_at": {
            str(k): round(statistics.fmean(by_id.values()), 4) for k, by_id in pass_by_k.items()
        },
        "groups": len(groups),
        "flat_groups": sum(not _mixed(rewards) for rewards in groups),
        "solved_by_all": sum(map(all, solved)),
        "solved_by_none": sum(not any(each) for each in solved),
        "turns": _spread([each.turns for each in attempts]),
        "output_tokens": _spread([each.output_tokens for each in attempts]),
        "stop_reasons": dict(Counter(each.stop for each in attempts).most_common()),
        "per_sample": per_sample,
    }


def pass_at(k: int, rewards: Sequence[float], full: float) -> float:
    """Return the unbiased estimate of the chance that one of k attempts earns the full reward."""
    n, solved = len(rewards), sum(reward >= full - TINY for reward in rewards)
    if n - solved < k:
        return 1.0
    return 1.0 - math.comb(n - solved, k) / math.comb(n, k)


def _spread(values: Sequence[int]) -> dict[str, float]:
    ranked = sorted(values)

    def at(portion: float) -> float:
        return ranked[min(len(ranked) - 1, int(portion * len(ranked)))]

    return {
        "least": ranked[0],
        "median": at(0.5),
        "p90": at(0.9),
        "most": ranked[-1],
        "mean": round(statistics.fmean(ranked), 1),
    }


def _find_flat(
    by_group: Mapping[str, list[float]], attempts: Sequence[ModelAttempt]
) -> list[Finding]:
    groups = {name: rewards for name, rewards in by_group.items() if len(rewards) > 1}
    flat = [name for name, rewards in groups.items() if not _mixed(rewards)]
    if not groups or 2 * len(flat) < len(groups):
        return []
    shown = next(each for each in attempts if each.group == flat[0])
    on = part_of(len(flat), len(groups), "group")
    message = f"{on} with one reward for all attempts: nothing is learned from them."
    severity = Severity.HIGH if len(flat) == len(groups) > 1 else None
    return [finding("no-signal", message, shown, severity=severity)]


def _find_extremes(
    by_sample: Mapping[int | str, list[float]], attempts: Sequence[ModelAttempt], full: float
) -> list[Finding]:
    several = {id: rewards for id, rewards in by_sample.items() if len(rewards) > 1}
    all_solve = [id for id, r in several.items() if all(x >= full - TINY for x in r)]
    none_solve = [id for id, r in several.items() if all(x <= TINY for x in r)]
    found = []
    for code, ids in (("solved-by-all", all_solve), ("solved-by-none", none_solve)):
        if ids:
            shown = [next(each for each in attempts if each.sample == id) for id in ids]
            names = ", ".join(map(str, ids[:10])) + (", …" if len(ids) > 10 else "")
            message = f"{part_of(len(ids), len(several), 'sample')}: {names}"
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


def _recommend(
    by_sample: Mapping[int | str, list[float]],
    attempts: Sequence[ModelAttempt],
    flat_samples: Collection[int | str],
    keep: int,
    full: float,
) -> dict[str, Any]:
    """Recommend group size, reply length and samples for a first run."""
    rates = [
        sum(r >= full - TINY for r in rewards) / len(rewards)
        for id, rewards in by_sample.items()
        if id not in flat_samples
    ]
    rate = statistics.median(rates) if rates else 0.5
    flat = max(rate, 1 - rate)
    # the smallest group whose rewards differ nine times in ten: flat^G <= 0.1
    size = math.ceil(math.log(0.1) / math.log(flat)) if 0 < flat < 1 else 8
    longest = _spread([max(1, each.output_tokens // max(each.turns, 1)) for each in attempts])
    advice: dict[str, Any] = {
        "group_size": max(4, min(64, size)),
        "max_tokens": 64 * math.ceil(1.5 * longest["p90"] / 64),
        "keep": keep,
        "drop": len(flat_samples),
    }
    if keep and flat_samples:
        advice["sample_ids_file"] = KEEP
    return advice


# cost


@dataclass(frozen=True)
class Cost:
    """Reports the cost of a real model's attempts; `inspect rl train --dry-run` estimates it."""

    async def __call__(self, audit: AuditContext) -> Sequence[Finding]:
        options = audit.options
        if not options.attempts:
            return []
        plan = plan_of(
            _average(options.attempts),
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


def _average(attempts: Sequence[ModelAttempt]) -> EpisodeCost:
    costs = []
    for each in attempts:
        # of prompts that grow evenly from p to n·p, the sum is p·n(n+1)/2 and the last is n·p
        seen = round(each.input_tokens * (1 - 2 / (each.turns + 1))) if each.turns > 1 else 0
        cached = each.cached_tokens or seen
        read = each.input_tokens - cached
        trained = each.trained_tokens
        costs.append(
            EpisodeCost(
                turns=each.turns,
                prefilled=read,
                cached=cached,
                sampled=each.output_tokens,
                trained=read + each.output_tokens if trained is None else trained,
                sandbox_seconds=each.sandbox_seconds,
                seconds=each.seconds,
                exact=True,
            )
        )
    return average_costs(costs, [1.0] * len(costs))
