"""The only package that touches private names of Inspect.

Inspect promises its public API; running one sample outside of ``eval()`` needs a little more.
``docs/upstream.md`` lists every private name, and the public one that would let it go. Each module
here has the names of one part of Inspect; this façade has them all. An unsupported release leads to
a :class:`VersionError` that names what it lacks.
"""

# ruff: noqa: F403  (each module says in `__all__` what it offers)

from __future__ import annotations

from importlib.metadata import version

from inspect_tinker_plugin.contracts.errors import VersionError
from inspect_tinker_plugin.inspect_internals.releases import SUPPORTED_INSPECT

try:
    from inspect_tinker_plugin.inspect_internals import calls, sandboxes, tasks
    from inspect_tinker_plugin.inspect_internals.calls import *
    from inspect_tinker_plugin.inspect_internals.sandboxes import *
    from inspect_tinker_plugin.inspect_internals.tasks import *
except (ImportError, AttributeError) as error:
    raise VersionError(
        f"inspect-ai {version('inspect-ai')} is not supported by inspect-tinker-plugin "
        f"{version('inspect-tinker-plugin')} (supported: {SUPPORTED_INSPECT}): {error}. "
        "Install a supported release of either package."
    ) from error

__all__: list[str] = ["SUPPORTED_INSPECT"]
__all__ += calls.__all__
__all__ += tasks.__all__
__all__ += sandboxes.__all__
