import socket
import threading
import time

import pytest

from helpers.turns import said
from tokencredit.errors import ConfigError
from tokencredit.settings.data import EnvironmentConfig
from tokencredit.text.turns.environments import load_environments
from tokencredit.text.turns.protocols.episode import Reply

pytest.importorskip("openenv.core", reason="needs openenv: pip install tokencredit[openenv]")
pytestmark = [
    pytest.mark.slow,  # OpenEnv's server takes seconds to import
    pytest.mark.filterwarnings("ignore:Exception ignored in.*socket"),  # sessions stay open until the process ends
]


@pytest.fixture(scope="module")
def over():
    """An event that hanging steps wait for."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture(scope="module")
def url(over):
    """A server of OpenEnv's own, whose environment repeats what it hears and is done at the second step."""
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Say(Action):
        message: str
        loud: bool = False

    class Heard(Observation):
        echo: str = ""
        length: int = 0

    class Echo(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **columns):
            self.steps = 0
            return Heard(echo=f"Seed {seed}, {columns}.", length=3)

        def step(self, action, **options):
            self.steps += 1
            if action.message == "hang":
                over.wait()
            if action.message == "fail":
                raise ValueError("no")
            reward = None if self.steps == 1 else 0.5
            return Heard(echo=action.message, length=len(action.message), reward=reward, done=self.steps == 2)

        @property
        def state(self):
            return State()

    app = create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=8)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        while thread.is_alive() and not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        over.set()
        server.force_exit = server.should_exit = True
        thread.join()


def begun(url, rows=({},), timeout=60.0, **kwargs):
    runs = load_environments(EnvironmentConfig(factory=f"openenv:{url}", kwargs=kwargs, timeout=timeout), [])
    episodes = runs.begin(list(rows), list(range(len(rows))))
    return runs, episodes, [episode.start() for episode in episodes]


def test_episodes_on_a_server_have_sessions_of_their_own(url):
    rows = [{"level": 2, "prompt": "Hear: "}, {"level": 3, "prompt": "Hear: "}]
    _, (first, second), prompts = begun(url, rows, observation="echo")
    assert prompts == ["Hear: Seed 0, {'level': 2}.", "Hear: Seed 1, {'level': 3}."]
    assert first.reply(said("Hi.")) == Reply("Hi.", 0.0)
    assert second.reply(said("Ho.")) == Reply("Ho.", 0.0)
    assert first.reply(said("Bye.")) == Reply("Bye.", 0.5, "done")


def test_an_observation_without_a_chosen_field_is_json(url):
    _, (episode,), (prompt,) = begun(url)
    assert prompt == '{"echo": "Seed 0, {}.", "length": 3}'
    assert episode.reply(said("Hi.")).observation == '{"echo": "Hi.", "length": 3}'


def test_a_step_that_fails_ends_the_episode_and_the_next_one_begins(url):
    runs, (episode,), _ = begun(url, observation="echo")
    reply = episode.reply(said("fail"))
    assert (reply.ending, reply.problems) == ("error", ("failed",))
    assert "no" in reply.observation
    (again,) = runs.begin([{}], [9])
    assert again.start() == "Seed 9, {}."


def test_a_step_that_hangs_ends_the_episode_and_the_next_one_has_a_new_session(url):
    runs, (episode,), _ = begun(url, observation="echo", timeout=2.0)
    assert episode.reply(said("hang")).problems == ("timeout",)
    (again,) = runs.begin([{}], [9])
    assert again.start() == "Seed 9, {}."
    assert again.reply(said("Hi.")) == Reply("Hi.", 0.0)


@pytest.mark.parametrize(
    ("change", "kwargs", "problem"),
    [
        ("ftp://x", {}, r"env\.factory openenv:ftp://x: it must be an address that begins with http:// or https://"),
        ("http://127.0.0.1:1", {}, "no OpenEnv server answers at http://127.0.0.1:1: "),
        ("{url}/nowhere", {}, "no OpenEnv server answers at .*/nowhere: HTTP Error 404"),
        ("{url}", {"action": "loud"}, r"env\.kwargs\.action is 'loud'; it must name the field .*: message$"),
        ("{url}", {"observation": "x"}, r"env\.kwargs\.observation is 'x'; it must be one of echo, length"),
    ],
)
def test_mistakes(url, change, kwargs, problem):
    with pytest.raises(ConfigError, match=problem):
        begun(change.format(url=url), **kwargs)
