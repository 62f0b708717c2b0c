"""What changes weights: experience, updates, optimisers, controllers, stopping."""
