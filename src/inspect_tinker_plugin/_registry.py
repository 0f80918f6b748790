"""What Inspect loads through the package's entry point: names, with the work behind them late."""

from __future__ import annotations

from inspect_tinker_plugin import _startup

# Where start-up files are off (`python -S`), the first look-up by Inspect is the moment.
_startup.install()
