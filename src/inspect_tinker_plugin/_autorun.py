# Every interpreter runs this text, see _startup.py: keep it tiny.
import sys


class InspectRLFinder:
    @staticmethod
    def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name == "inspect_ai" or name == "inspect_ai._cli.main":
            try:
                from inspect_tinker_plugin._startup import find_spec
            except Exception:  # half uninstalled, say: import Inspect as if we were not there
                return None
            return find_spec(name, path, target)
        return None


sys.meta_path.insert(0, InspectRLFinder)
