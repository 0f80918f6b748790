"""``python -m inspect_tinker_plugin``: the same as ``inspect-rl``."""

from inspect_tinker_plugin.cli.main import main

if __name__ == "__main__":
    main("python -m inspect_tinker_plugin")
