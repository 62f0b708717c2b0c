"""The prompts of successive batches, also after a change of their number of completions."""

from types import SimpleNamespace

from tokencredit.distributed.processes import Processes
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.text.data.stream import BatchStream


def prompts(first, size, repeat):
    """As `Prompts.batch`: the place of each row in the sequence of prompts."""
    return [(first + i) // repeat for i in range(size)]


def stream(batch_size, per_prompt):
    settings = RolloutConfig(batch_size=batch_size, per_prompt=per_prompt, max_new_tokens=2)
    return BatchStream(SimpleNamespace(batch=prompts), settings, Processes(), seed=1)


def test_groups_stay_whole_and_prompts_go_on_where_they_were():
    before, after, single = stream(10, 2), stream(12, 4), stream(3, 1)
    assert before.next_batch()[0] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    after.load_state_dict(before.state_dict())
    assert after.next_batch()[0] == [5] * 4 + [6] * 4 + [7] * 4
    single.load_state_dict(after.state_dict())
    assert single.next_batch()[0] == [8, 9, 10]
