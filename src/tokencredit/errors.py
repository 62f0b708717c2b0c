"""What is not our bug: the message is all that a person needs, so no traceback is shown with it."""


class ConfigError(ValueError):
    """A setting that cannot be used: the message names the key or file, what it was and what it may be."""


class NotInstalled(ConfigError):
    """A package that is missing: the message says what needs it and how to install it."""

    def __init__(self, user: str, package: str):
        name = package.partition("[")[0]
        super().__init__(f"{user} needs {name}, which is not installed: pip install {package}")


class RunStopped(RuntimeError):
    """A run that could not go on: the message says where and why, and `stopped_by` in a few words for the summary."""

    stopped_by = "an error"


class OutOfMemory(RunStopped):
    """A run that needed more memory than there was."""

    stopped_by = "a lack of memory"


class TooManyBadSteps(RunStopped):
    """A run with `run.max_bad_steps` losses, gradients or rewards in a row that were not finite."""

    stopped_by = "numbers that are not finite"
