"""The cookbook's interfaces: datasets, groups and environments made of episodes."""
