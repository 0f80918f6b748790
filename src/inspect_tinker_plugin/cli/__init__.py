"""The commands of ``inspect rl``, one module each, imported when it is called."""
