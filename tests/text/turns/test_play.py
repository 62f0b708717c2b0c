"""Episodes of real environments with the built-in grid's small model, whose random turns are 1 to 8 tokens."""

import threading
from dataclasses import replace

import pytest
import torch

from tokencredit.core.masked import extents
from tokencredit.distributed.processes import Processes
from tokencredit.errors import RunStopped
from tokencredit.settings.data import EnvironmentConfig
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.text.data.prompts import Prompts
from tokencredit.text.data.tasks import Tasks
from tokencredit.text.models.precision import Precision
from tokencredit.text.models.run_models import build_models, load_start
from tokencredit.text.ppo_setup import build_pipeline
from tokencredit.text.rollout_passes import rollout_logprobs
from tokencredit.text.turns.environments import load_environments
from tokencredit.text.turns.protocols.factories import EnvironmentFailed

SETTINGS = SamplingConfig(max_new_tokens=120)


@pytest.fixture(scope="module")
def models():
    args = PPOConfig.from_dict({"model.name": "builtin:grid", "model.dtype": "float32", "kl.coef": 0})
    lm, tokenizer = load_start(args.model)
    return args, build_models(args, lm, tokenizer, Precision("float32", Processes().device), None, True)


@pytest.fixture
def player(models):
    args, built = models
    processes = Processes()

    def make(factory=None, tools=None, **env):
        settings = replace(args, env=EnvironmentConfig(**{"turn_tokens": 8} | env))
        environments = load_environments(settings.env, [], factory=factory, functions=tools)
        return build_pipeline(settings, built, [], processes, environments).player

    return make


def play(player, count=6, rows=None, settings=SETTINGS, seed=0, repeat=1):
    tasks = Tasks(rows, name="rows", seed=5, shuffle=False).batch(0, count, repeat)
    uniforms = torch.rand(count, settings.max_new_tokens, generator=torch.Generator().manual_seed(seed))
    return player.play(tasks, settings, uniforms)


class Steps:
    """Plays a fixed number of turns and pays a tenth for each."""

    turns = 3

    def reset(self, row):
        self.taken, self.heard = 0, []
        return f"Reach the goal in {self.turns} moves and avoid the holes.\n"

    def step(self, completion):
        self.taken += 1
        self.heard.append(completion)
        return f"\nMoved.\nGoal: {self.taken} up 0 left\nMove:", 0.1, self.taken == self.turns


def test_turns_and_observations_alternate_and_only_turns_are_acted(player):
    played = play(player(Steps))
    rollout, tokenizer = played.rollout, player(Steps).engine.tokenizer
    for row, transcript in enumerate(played.transcripts):
        spans = transcript.spans
        assert [span.role for span in spans] == ["assistant", "environment"] * 2 + ["assistant"]
        assert [span.start for span in spans[1:]] == [span.end for span in spans[:-1]]
        assert spans[-1].end == extents(rollout.mask)[row] == rollout.response_lengths()[row]
        for number, span in enumerate(spans):
            ids = rollout.response_ids[row, span.start : span.end].tolist()
            assert (rollout.mask[row, span.start : span.end] == (span.role == "assistant")).all()
            if span.role == "assistant":
                assert ids == list(transcript.turns[number // 2].ids)
                assert rollout.turn_ends[row, span.start : span.end].tolist() == [False] * (len(ids) - 1) + [True]
            else:
                text = f"\nMoved.\nGoal: {number // 2 + 1} up 0 left\nMove:"
                assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert transcript.turn_rewards() == [(len(turn.ids), 0.1) for turn in transcript.turns]
        assert transcript.episode.environment.heard == [turn.text for turn in transcript.turns]
    assert {transcript.ending for transcript in played.transcripts} == {"done"}
    assert not rollout.truncated.any()


def test_an_episode_of_one_turn_is_a_completion(player, models):
    class Once(Steps):
        turns = 1

    playing, (_, built) = player(Once, turn_tokens=None), models
    played = play(playing)
    prompts = Prompts([Once().reset({})], built.tokenizer).batch(0, 6)
    uniforms = torch.rand(6, 120, generator=torch.Generator().manual_seed(0))
    alone = playing.engine.generate(prompts, SETTINGS, uniforms)
    assert torch.equal(played.rollout.response_ids, alone.response_ids)
    assert torch.equal(played.rollout.mask, alone.mask)
    assert torch.equal(played.rollout.logprobs, alone.logprobs)


def test_the_completions_of_a_group_share_row_and_seed(player):
    seen = []

    class Seeded(Steps):
        def reset(self, row):
            seen.append((row["seed"], row["word"]))
            return super().reset(row)

    play(player(Seeded), count=6, rows=[{"word": "a"}, {"word": "b"}], repeat=3)
    seen.sort(key=lambda pair: pair[1])
    assert [word for _, word in seen] == ["a"] * 3 + ["b"] * 3
    assert len({seed for seed, _ in seen[:3]}) == len({seed for seed, _ in seen[3:]}) == 1
    assert seen[0][0] != seen[3][0]


def test_a_slow_environment_does_not_hold_up_the_others(player, monkeypatch):
    """The first episode answers only once all others have ended; if they waited for it, it would time out."""
    others = threading.Semaphore(0)

    class Patient(Steps):
        def reset(self, row):
            self.waits = row["first"]
            return super().reset(row)

        def step(self, completion):
            if self.waits and self.taken == 0:
                for _ in range(5):
                    assert others.acquire(timeout=30)
            result = super().step(completion)
            if result[2] and not self.waits:
                others.release()
            return result

    monkeypatch.setattr("tokencredit.text.turns.play.PATIENCE", 0.05)
    playing = player(Patient, timeout=60.0)
    played = play(playing, rows=[{"first": row == 0} for row in range(6)])
    assert [transcript.ending for transcript in played.transcripts] == ["done"] * 6
    assert not any(reply.problems for transcript in played.transcripts for reply in transcript.replies)
    rollout = played.rollout
    now = rollout_logprobs(playing.engine.policy, rollout, 1.0, None).detach()
    torch.testing.assert_close(now[rollout.mask], rollout.logprobs[rollout.mask], atol=1e-5, rtol=1e-5)


def test_the_turns_of_an_endless_environment_are_bounded(player):
    class Endless(Steps):
        turns = 10**9

    played = play(player(Endless, max_turns=4), settings=SamplingConfig(max_new_tokens=200))
    assert [(len(transcript.turns), transcript.ending) for transcript in played.transcripts] == [(4, "max_turns")] * 6
    assert played.rollout.truncated.all()
    for transcript in played.transcripts:
        assert len(transcript.replies) == 4, "the last turn is answered too: its reward counts"
        assert transcript.after().startswith("\nMoved.")


def test_an_episode_whose_tokens_are_spent_is_cut_there(player):
    class Long(Steps):
        turns = 10**9

        def step(self, completion):
            observation, reward, done = super().step(completion)
            return observation * 2, reward, done

    played = play(player(Long, max_turns=100), settings=SamplingConfig(max_new_tokens=60))
    assert {transcript.ending for transcript in played.transcripts} == {"length"}
    assert played.rollout.truncated.all()
    assert (played.rollout.response_lengths() <= 60).all()


def test_an_observation_that_fills_the_remaining_tokens_ends_the_episode(player, models):
    tokenizer = models[1].tokenizer
    size = len(tokenizer(Steps().reset({}) and "\nMoved.\nGoal: 1 up 0 left\nMove:")["input_ids"])
    stop = SamplingConfig(max_new_tokens=size + 8, stop_at_eos=False)
    played = play(player(Steps), settings=stop)
    assert {transcript.ending for transcript in played.transcripts} == {"length"}
    one_more = play(player(Steps), settings=replace(stop, max_new_tokens=size + 9))
    assert [len(transcript.turns) for transcript in one_more.transcripts] == [2] * 6
    assert [len(transcript.turns[-1].ids) for transcript in one_more.transcripts] == [1] * 6


@pytest.mark.slow
def test_a_hanging_environment_is_cut_off_and_the_others_go_on(player, monkeypatch):
    hung, returned = threading.Event(), []

    class Hangs(Steps):
        def reset(self, row):
            self.hangs = row["first"]
            return super().reset(row)

        def step(self, completion):
            if self.hangs:
                hung.wait(60)
                returned.append(completion)
            return super().step(completion)

    monkeypatch.setattr("tokencredit.text.turns.play.PATIENCE", 0.1)
    played = play(player(Hangs, timeout=0.3), rows=[{"first": row == 0} for row in range(6)])
    assert not returned, "nothing waited for the hanging call"
    hung.set()
    assert [transcript.ending for transcript in played.transcripts][1:] == ["done"] * 5
    assert "timeout" in played.transcripts[0].replies[0].problems


def test_stop_strings_end_a_turn_and_not_the_episode(player):
    played = play(player(Steps), settings=SamplingConfig(max_new_tokens=120, stop=["p", "o", "l"]))
    turns = [turn for transcript in played.transcripts for turn in transcript.turns]
    assert len(turns) == 18
    assert any(turn.text[-1:] in "pol" for turn in turns)
    assert {transcript.ending for transcript in played.transcripts} == {"done"}


def test_a_prompt_that_does_not_fit_is_refused(player):
    class Wordy(Steps):
        def reset(self, row):
            super().reset(row)
            return "up " * 2000

    limit = r"at least one, and at most \d+; lower max_new_tokens \(120\) or shorten the prompt"
    with pytest.raises(RunStopped, match=rf"the prompt of an episode has \d+ tokens; it must have {limit}"):
        play(player(Wordy))


def test_texts_and_conversations_do_not_mix(player):
    class Mixed(Steps):
        def reset(self, row):
            text = super().reset(row)
            return text if row["first"] else [{"role": "user", "content": text}]

    with pytest.raises(EnvironmentFailed, match="reset gave plain texts and conversations"):
        play(player(Mixed), rows=[{"first": row == 0} for row in range(6)])
