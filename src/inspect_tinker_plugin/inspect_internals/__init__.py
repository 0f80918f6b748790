"""The only package that touches private names of Inspect, each with the reason why.

Inspect promises its public API; running one sample outside of ``eval()`` needs a little
more. ``names`` lists every private name with why no public one serves; the other modules import
them, each those of one part of Inspect. This façade has them all, once they were looked up.
"""

# ruff: noqa: E402, F403  (the check has to run before the imports that it guards)

from __future__ import annotations

from inspect_tinker_plugin.inspect_internals import names
from inspect_tinker_plugin.inspect_internals.names import *

names.check_inspect_version()

from inspect_tinker_plugin.inspect_internals import (
    calls,
    samples,
    sandboxes,
    tasks,
)
from inspect_tinker_plugin.inspect_internals.calls import *
from inspect_tinker_plugin.inspect_internals.samples import *
from inspect_tinker_plugin.inspect_internals.sandboxes import *
from inspect_tinker_plugin.inspect_internals.tasks import *

__all__: list[str] = []
__all__ += names.__all__
__all__ += calls.__all__
__all__ += samples.__all__
__all__ += sandboxes.__all__
__all__ += tasks.__all__
