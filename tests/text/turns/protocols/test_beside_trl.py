"""The same class, function and reward function in TRL's GRPOTrainer and here: the same calls, tools and messages."""

import json
import os
import subprocess
import sys

import pytest

from helpers import trl_world
from helpers.turns import called, environments, said
from tokencredit.text.rewards.terms import as_terms, score


def here():
    """What is written down, with the tools and the rewards, where the episodes are played here."""
    trl_world.SEEN.clear()
    runs = environments(trl_world.World, [trl_world.look])
    rows = [row for row in trl_world.ROWS for _ in range(2)]
    runs.check_columns(list(rows[0]))
    episodes = runs.begin(rows, [1, 1, 2, 2])
    prompts = [episode.start() for episode in episodes]
    completions = []
    for episode in episodes:
        turn = called(*trl_world.CALLS)
        reply = episode.reply(turn)
        assert episode.reply(said("Done.")).ending == "answer"
        completions.append([turn.message, *reply.observation, {"role": "assistant", "content": "Done."}])
    terms = [*as_terms([trl_world.scored]), *runs.terms()]
    columns = {"environments": [episode.environment for episode in episodes], "n": [row["n"] for row in rows]}
    score(terms, prompts, completions, columns, [1] * len(rows))
    return {
        "tools": [tool.__name__ for tool in runs.tools],
        "rewards": [[term.name for term in terms], [term.weight for term in terms]],
        "seen": trl_world.SEEN,
    }


@pytest.mark.proof  # TRL takes 12 seconds of a core; test_tool_episode.py has the same form without it
def test_an_environment_of_trls_works_unchanged(tokenizer, tmp_path):
    pytest.importorskip("trl", reason="needs TRL: pip install tokencredit[path]")
    tokenizer.save_pretrained(tmp_path)
    trl = subprocess.run(
        [sys.executable, trl_world.__file__, str(tmp_path)],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert trl.returncode == 0, trl.stderr
    there = next(line for line in trl.stdout.splitlines() if line.startswith("SEEN "))
    assert here() == json.loads(there.removeprefix("SEEN "))
