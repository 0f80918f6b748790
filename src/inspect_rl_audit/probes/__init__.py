"""The built-in probes, one module per side of a task."""
