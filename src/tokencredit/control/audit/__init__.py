"""The true values of an agent's states, played, and the critic and estimators beside them."""
