"""Episodes of several turns: environments, tools, chat templates, and their rollouts."""
