"""The commands of ``inspect rl``; a module each, imported when it is called."""
