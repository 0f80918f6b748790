"""Episodes as tokens: the only folder that knows tinker and its cookbook."""
