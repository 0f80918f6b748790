"""What is played on the first use of a new release agrees with the installed one."""

from __future__ import annotations

from inspect_tinker_plugin.testing.smoke import find_difference


async def test_the_trial_of_a_release_finds_no_difference() -> None:
    assert await find_difference() is None
