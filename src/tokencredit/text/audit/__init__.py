"""Monte-Carlo estimates of true values, and audits of a run's credit against them."""
