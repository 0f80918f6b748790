"""Worker processes, signals that stop them, and the memory of a process with many episodes."""
