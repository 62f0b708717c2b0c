"""The two protocols of environments: tools, as in TRL, and steps."""
