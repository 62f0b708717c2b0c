"""What changes weights: experience, objective, learner, optimizers, controllers, stopping rules."""
