"""The fault campaign: runs thousands of episodes with a random fault each.

A group under the cookbook's own strategies must either have exactly the rewards of a clean run,
or mark its failures with their cause; afterwards nothing may be left behind. Run it with
``python -m tests.faults.campaign`` (``make faults``).
"""

from __future__ import annotations

from tests.faults.campaign.campaign import Report, Settings, run_campaign
from tests.faults.campaign.plan import Case, Fault, Kind, Point, draw

__all__ = ["Case", "Fault", "Kind", "Point", "Report", "Settings", "draw", "run_campaign"]
