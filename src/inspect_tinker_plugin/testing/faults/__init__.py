"""The fault campaign: thousands of episodes with a random fault each, and nothing goes wrong.

A group of the cookbook's own strategies either has exactly the rewards of a clean run, or its
failures are marked with their cause; and when all is over nothing is left. Run it with
``python -m inspect_tinker_plugin.testing.faults`` (``make faults``).
"""

from __future__ import annotations

from inspect_tinker_plugin.testing.faults.campaign import Report, Settings, run_campaign
from inspect_tinker_plugin.testing.faults.plan import Case, Fault, Kind, Point, draw

__all__ = ["Case", "Fault", "Kind", "Point", "Report", "Settings", "draw", "run_campaign"]
