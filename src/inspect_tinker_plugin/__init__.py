"""Turn any Inspect AI task into a Tinker reinforcement-learning environment."""
