"""A run's report and the comparison of runs: HTML pages that show where the credit went."""
