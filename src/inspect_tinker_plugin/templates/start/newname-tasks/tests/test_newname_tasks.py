"""The task as an eval and as an episode: the same turns, tool results and scores."""

from __future__ import annotations

from newname_tasks import stock

from inspect_tinker_plugin.testing import call, check_parity, say, submit

SEARCH = [say("", call("count", item="apples")), say("", call("count", item="pears"))]


def test_episodes_agree_with_evals() -> None:
    for answer, score in (("19", "C"), ("12", "I")):
        [report] = check_parity(stock, script=[*SEARCH, submit(answer)])
        assert report.agrees, report
        assert report.eval_side is not None
        assert report.eval_side.scores["match"]["value"] == score
