"""Training runs: train a model on a task with the cookbook's own loop."""
