"""Models: loading and saving, the actor-critic, the compute dtype."""
