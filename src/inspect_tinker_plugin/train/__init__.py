"""Training runs: a task to a better model, with the cookbook's own loop."""
