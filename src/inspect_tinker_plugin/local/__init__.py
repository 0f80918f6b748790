"""A real Tinker API server on this machine, for training without the hosted service."""
