"""What is not our bug: the message is all that a person needs, so no traceback is shown with it."""


class ConfigError(ValueError):
    """A setting that cannot be used: the message names the key or file, what it was and what it may be."""


class RunStopped(RuntimeError):
    """A run that could not go on: the message says where and why."""
