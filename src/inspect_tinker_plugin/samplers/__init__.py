"""Samplers: which samples a training's next batch has, given the rewards so far."""
