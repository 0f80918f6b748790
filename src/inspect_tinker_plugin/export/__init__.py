"""Exports: the first prompt of every sample, as the task's own solver would send it."""
