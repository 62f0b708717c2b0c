"""Environments, turns and calls for the tests of episodes."""

from tokencredit.settings.data import EnvironmentConfig
from tokencredit.text.turns.environments import load_environments
from tokencredit.text.turns.protocols.episode import Turn


def said(text):
    """A turn of plain text."""
    return Turn([1], text)


def called(*calls, malformed=None):
    """A turn that calls tools: pairs of a name and arguments."""
    parsed = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]
    return Turn([1], "", {"role": "assistant", "content": "", "tool_calls": parsed}, malformed)


def environments(factory=None, functions=None, **settings):
    """Environments from Python, with these settings of `env`."""
    return load_environments(EnvironmentConfig(**settings), [], factory=factory, functions=functions)


def episode(factory=None, functions=None, row=None, seed=7, **settings):
    """One episode, and the prompt with which it starts."""
    (begun,) = environments(factory, functions, **settings).begin([row or {}], [seed])
    return begun, begun.start()


def texts(reply):
    """The contents of a reply's messages."""
    return [message["content"] for message in reply.observation]
