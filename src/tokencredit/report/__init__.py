"""What a run was: its diagnosis, and a page that shows where the credit went."""
