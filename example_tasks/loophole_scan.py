"""A scanner of Inspect Scout for the loophole of loophole.py: how many replies use it."""

from __future__ import annotations

from inspect_scout import Result, Scanner, Transcript, scanner


@scanner(messages="all")
def digits_used() -> Scanner[Transcript]:
    """Whether more than a third of a reply are digits."""

    async def scan(transcript: Transcript) -> Result:
        text = transcript.messages[-1].text
        return Result(value=sum(map(str.isdigit, text)) > len(text) / 3)

    return scan
