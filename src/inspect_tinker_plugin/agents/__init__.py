"""The model API that agent programs in an episode's sandboxes talk to."""
