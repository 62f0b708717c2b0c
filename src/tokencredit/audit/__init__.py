"""Credit against the truth: true values by Monte Carlo, and the agreement of critics and estimators with them."""
