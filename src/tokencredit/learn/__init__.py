"""The update: experience, objective, learner, optimizers, KL controllers, stopping rules."""
