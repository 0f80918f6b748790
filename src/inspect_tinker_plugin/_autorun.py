"""The start-up file's text (see pyproject.toml), run by every interpreter: keep it tiny."""
# It reaches for the package only when Inspect is imported. Whatever goes wrong then,
# Inspect is imported as if this were not installed.

import sys


class InspectRLFinder:
    @staticmethod
    def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name == "inspect_ai" or name == "inspect_ai._cli.main":
            try:
                from inspect_tinker_plugin._startup import find_spec
            except Exception:
                return None
            return find_spec(name, path, target)
        return None


sys.meta_path.insert(0, InspectRLFinder)
