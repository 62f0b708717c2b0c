import pytest

from helpers.turns import said
from tokencredit.errors import ConfigError
from tokencredit.settings.data import EnvironmentConfig
from tokencredit.text.turns.builtin.gymnasium import marked
from tokencredit.text.turns.environments import load_environments
from tokencredit.text.turns.protocols.episode import Reply

pytest.importorskip("gymnasium", reason="needs gymnasium: pip install tokencredit[control]")

LAKE = "[S]FFF\nFHFH\nFFFH\nHFFG\nSay left, down, right or up.\n"


def begun(name, row=None, seeds=(3,), **kwargs):
    runs = load_environments(EnvironmentConfig(factory=f"gymnasium:{name}", kwargs=kwargs), [])
    episodes = runs.begin([row or {}] * len(seeds), list(seeds))
    return episodes, [episode.start() for episode in episodes]


def walk(episode, actions):
    return [episode.reply(said(action)) for action in actions.split()]


def test_a_walk_over_the_lake():
    (episode,), (prompt,) = begun("FrozenLake-v1", is_slippery=False)
    assert prompt == (
        "Walk from S to G over the frozen lake F, and around the holes H. The square in brackets is yours.\n" + LAKE
    )
    assert episode.reply(said(" I go Right, not left")).observation == "\n" + LAKE.replace("[S]F", "S[F]")
    replies = walk(episode, "left down down right down right right")
    assert replies[-1] == Reply("", 1.0, "done")
    assert [reply.reward for reply in replies[:-1]] == [0.0] * 6


def test_a_fall_ends_the_episode_without_a_reward():
    (episode,), _ = begun("FrozenLake-v1", is_slippery=False)
    assert walk(episode, "right down")[-1] == Reply("", 0.0, "done")


def test_a_turn_without_an_action_changes_nothing():
    (episode,), _ = begun("FrozenLake-v1")
    for text in ("", "swim", "rightly", "\ud800"):
        assert episode.reply(said(text)) == Reply("\nThat names no action.\nSay left, down, right or up.\n", 0.0)


def test_the_seed_decides():
    episodes, _ = begun("FrozenLake-v1", seeds=(3, 3, 4, 5, 6, 7), is_slippery=True)
    walks = [[reply.observation for reply in walk(episode, "right right right")] for episode in episodes]
    assert walks[0] == walks[1]
    assert any(walks[0] != other for other in walks[2:])


def test_the_cliff_costs_100_and_no_limit_of_gymnasiums_ends_the_episode():
    (episode,), (prompt,) = begun("CliffWalking-v1")
    assert prompt.splitlines()[4] == "x  C  C  C  C  C  C  C  C  C  C  T"
    assert episode.reply(said("right")).reward == -100.0
    assert {episode.reply(said("left")).ending for _ in range(300)} == {None}


def test_a_taxi_drives_its_passenger():
    (episode,), (prompt,) = begun("Taxi-v4", seeds=(3,))
    assert "|R(1): |[ ]: :G|\n" in prompt
    assert "|Y(2)| : |B: |\n" in prompt
    replies = walk(episode, "down down left left up up pickup down down down down dropoff")
    assert "|[R+]: | : :G|\n" in replies[6].observation
    assert replies[-1] == Reply("", 20.0, "done")


def test_cards_in_words():
    (episode,), (prompt,) = begun("Blackjack-v1", {"prompt": [{"role": "user", "content": "Play. "}]})
    assert prompt[0]["content"] == (
        "Play. Come as close to 21 as you can, but not above.\nYour cards sum to 7; the dealer shows 10.\n"
        "Say stick or hit.\n"
    )
    assert episode.reply(said("stick")).ending == "done"


def test_marks_in_place_of_colors():
    assert marked("\x1b[34;1m\x1b[43mR\x1b[0m\x1b[0m \x1b[42m_\x1b[0m \x1b[35mB\x1b[0m") == "[R](1) [_+] B(2)"


@pytest.mark.parametrize(
    ("name", "kwargs", "problem"),
    [
        ("CartPole-v1", {}, "env.factory gymnasium:CartPole-v1: it must be one of the environments that have a text"),
        ("Taxi-v99", {}, "Gymnasium cannot make it: "),
        ("FrozenLake-v1", {"depth": 2}, "Gymnasium cannot make it: .*unexpected keyword argument 'depth'"),
    ],
)
def test_mistakes(name, kwargs, problem):
    with pytest.raises(ConfigError, match=problem):
        begun(name, **kwargs)
