"""Evaluation of what was trained: the provider `tinker`, and what a run was trained on."""
