"""Episodes: Inspect's own solver, tools, limits and scorers, parked at each model call."""
