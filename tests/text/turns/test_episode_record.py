"""Transcripts of episodes as reward functions receive them."""

import pytest

from tokencredit.text.turns.episode_record import Transcript
from tokencredit.text.turns.protocols.episode import Reply, Turn


@pytest.mark.parametrize(("rendered", "prefill"), [("assistant: It was ", "It was "), ("assistant: It was", "It was")])
def test_the_first_message_begins_with_the_prefill(rendered, prefill):
    """As in a completion of one turn; what the template has stripped was not read."""
    call = [{"type": "function", "function": {"name": "look", "arguments": {}}}]
    first = {"role": "assistant", "content": "bad.", "tool_calls": call}
    observation = [{"role": "tool", "name": "look", "content": "A film."}]
    episode = Transcript(None, [Turn([1], "", first), Turn([1], "Yes.")], [Reply(observation), Reply(ending="answer")])
    question, begun = {"role": "user", "content": "How?"}, {"role": "assistant", "content": "It was "}
    rest = [*observation, {"role": "assistant", "content": "Yes."}]
    assert episode.completion([question, begun], rendered, "") == [first | {"content": f"{prefill}bad."}, *rest]
    assert episode.completion([question], "assistant:", "") == [first, *rest]
