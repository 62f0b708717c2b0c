"""The true values of a policy's states, sampled, and what a run shows beside them."""
