"""An environment of steps, an agent that plays it, and what a rollout leaves behind: nothing."""

import asyncio
import itertools
import threading
import time
from contextlib import ExitStack

import gymnasium
import pytest

from art_gym.errors import ToolTimeout
from art_gym.messages import call
from art_gym.rollout import Reply
from art_gym.scenarios import Scenario
from art_gym.spaces import ChatSpace, ToolCallSpace
from art_gym.store import EpisodeStore

collect_ignore = ["rollout_process.py"]
"""Programs that tests start: --doctest-modules would import them."""


class Steps(gymnasium.Env):
    """Ends after `options["turns"]` steps, each worth 0.5; `options["step"]` may name something odd that its step does in turn `options["at"]`.

    A plain Gymnasium environment: the runner needs no more than the API and the spaces.
    """

    observation_space = ChatSpace()
    action_space = ToolCallSpace({"go": {"type": "object", "properties": {}}})
    open_instances = 0
    lock = threading.Lock()

    def __init__(self):
        self.closed = False
        with Steps.lock:
            Steps.open_instances += 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.options = options or {}
        self.turn = 0
        if self.options.get("reset") == "raise":
            raise KeyError("no such mailbox")
        return ({"role": "user", "content": f"start {seed}"},), {}

    def step(self, action):
        self.turn += 1
        reward = 0.5
        if self.turn == self.options.get("at", 1):
            match self.options.get("step"):
                case "raise":
                    raise ZeroDivisionError("a bug")
                case "exit":
                    raise SystemExit(3)
                case "tool timeout":
                    raise ToolTimeout("search ran longer than 1 s")
                case "own timeout":
                    raise TimeoutError("the database")
                case "nan":
                    reward = float("nan")
                case "unwritable":
                    return ({"role": "user", "content": object()},), 0.0, True, False, {}
                case float(seconds):
                    time.sleep(seconds)
        done = self.turn >= self.options.get("turns", 2)
        info = {"rewards": {"step": reward}, "metrics": {"turns": self.turn}, "invalid_calls": 1, "turn": self.turn}
        return ({"role": "tool", "tool_call_id": "call_0", "content": f"step {self.turn}"},), reward, done, False, info

    def close(self):
        if not self.closed:
            self.closed = True
            with Steps.lock:
                Steps.open_instances -= 1


class InstantSteps(Steps):
    instant = True


class Agent:
    """Plays `go`, or what `odd` says for a scenario and turn."""

    name = "test agent"

    def __init__(self, odd=None, delay=0.0):
        self.odd = odd or (lambda state: None)
        self.delay = delay
        self.asked = []
        self.playing = self.most_playing = 0

    async def act(self, state):
        self.asked.append((state.scenario.id, state.member, state.turn))
        self.playing += 1
        self.most_playing = max(self.playing, self.most_playing)
        try:
            await asyncio.sleep(self.delay)
            odd = self.odd(state)
            if isinstance(odd, BaseException):
                raise odd
            if isinstance(odd, float):
                await asyncio.sleep(odd)
            return odd if isinstance(odd, Reply) else Reply(call("go"), policy="v1", prompt_ids=[1], completion_ids=[2], logprobs=[-0.1])
        finally:
            self.playing -= 1

    async def close(self):
        pass


def scenarios(count=None, **options):
    numbers = itertools.count() if count is None else range(count)
    return (Scenario(f"s{number}", seed=number, options=options) for number in numbers)


def mixed(count, odd, **options):
    """Scenarios of which those in `odd` have the options."""
    return [Scenario(f"s{number}", seed=number, options=options if number in odd else {}) for number in range(count)]


async def play(runner, starts, **kwargs):
    return [group async for group in runner.run(starts, **kwargs)]


@pytest.fixture(autouse=True)
def nothing_left_behind():
    Steps.open_instances = 0
    yield
    give_up = time.monotonic() + 4
    while time.monotonic() < give_up and (names() or Steps.open_instances):
        time.sleep(0.01)
    assert names() == []
    assert Steps.open_instances == 0


@pytest.fixture
def open_store(tmp_path):
    """Opens the same store anew each time, as another process would; closes them all at the end."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(EpisodeStore(tmp_path))


def names():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("art_gym ")]


@pytest.fixture(name="steps")
def steps_fixture():
    return Steps


@pytest.fixture(name="instant_steps")
def instant_steps_fixture():
    return InstantSteps


@pytest.fixture(name="any_steps", params=[Steps, InstantSteps])
def any_steps_fixture(request):
    return request.param


@pytest.fixture(name="an_agent")
def an_agent_fixture():
    return Agent


@pytest.fixture(name="scenarios")
def scenarios_fixture():
    return scenarios


@pytest.fixture(name="mixed")
def mixed_fixture():
    return mixed


@pytest.fixture(name="play")
def play_fixture():
    return play
