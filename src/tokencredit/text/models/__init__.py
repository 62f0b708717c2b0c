"""Models: loading and saving, the actor-critic, adapters, the compute dtype."""
