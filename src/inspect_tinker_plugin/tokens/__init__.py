"""Tokens: what the policy reads and writes, exact to the token, in every conversation."""
