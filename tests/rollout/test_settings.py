"""The runner's arguments: what can't be right is told before anything is played."""

import re

import gymnasium
import pytest

from art_gym.errors import UsageError
from art_gym.messages import call
from art_gym.rollout import Reply, Runner, show_progress
from art_gym.scenarios import Scenario

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("name", ["concurrency", "group_size"])
@pytest.mark.parametrize("value", [0, -1, True, 2.0, NAN, INF, "4", None, [4]])
def test_a_count_is_a_whole_number_of_at_least_one(steps, an_agent, name, value):
    with pytest.raises(UsageError, match=rf"{name} is {re.escape(repr(value))}; it must be a whole number of at least 1"):
        Runner(steps, an_agent(), **{name: value})


@pytest.mark.parametrize("name", ["turn_timeout", "tool_timeout", "episode_timeout"])
@pytest.mark.parametrize("value", [0, -1.5, True, NAN, -INF, "4", None, [4]])
def test_a_timeout_is_a_number_of_seconds(steps, an_agent, name, value):
    with pytest.raises(UsageError, match=rf"{name} is {re.escape(repr(value))}; it must be a number of seconds of more than 0"):
        Runner(steps, an_agent(), **{name: value})


async def test_a_timeout_may_be_endless(steps, an_agent, play, scenarios):
    groups = await play(Runner(steps, an_agent(), turn_timeout=INF, tool_timeout=INF, episode_timeout=INF), scenarios(2))
    assert [group.episodes[0].failure for group in groups] == [None, None]


@pytest.mark.parametrize("env", [None, 3, b"art_gym/GuessNumber-v0", ["art_gym/GuessNumber-v0"]])
def test_an_environment_is_an_id_or_a_function(an_agent, env):
    with pytest.raises(UsageError, match=rf"env must be an environment's id or a function that makes one, not {re.escape(repr(env))}"):
        Runner(env, an_agent())


def test_an_instance_is_refused_as_every_episode_in_play_has_its_own(steps, an_agent):
    env = steps()
    with pytest.raises(UsageError, match="not the instance <Steps instance>: each episode in play has its own"):
        Runner(env, an_agent())
    env.close()


@pytest.mark.parametrize("made", [None, 3, gymnasium.Env], ids=repr)
async def test_a_function_that_makes_no_environment_stops_the_rollout(an_agent, play, scenarios, made):
    with pytest.raises(UsageError, match=r"the function that makes the environment returned .*; it must return a gymnasium\.Env"):
        await play(Runner(lambda: made, an_agent()), scenarios())


@pytest.mark.parametrize("agent", [None, 3, "random", object()], ids=lambda agent: type(agent).__name__)
def test_an_agent_has_a_name_act_and_close(steps, agent):
    with pytest.raises(UsageError, match=r"agent is .*, without name, act, close; an agent has a name, async def act"):
        Runner(steps, agent)


def test_an_agent_is_an_instance(steps, an_agent):
    with pytest.raises(UsageError, match="agent must be an instance, not the class Agent: make one, Agent"):
        Runner(steps, an_agent)


async def test_an_agent_is_asynchronous(steps, an_agent, play, scenarios):
    agent = an_agent()
    agent.act = lambda state: Reply(call("go"))
    with pytest.raises(UsageError, match=r"the agent 'test agent' must be asynchronous, and its act returned Reply.*: write async def act"):
        await play(Runner(steps, agent), scenarios())


def test_an_engine_check_is_a_function(steps, an_agent):
    with pytest.raises(UsageError, match="engine_check is 'vllm'; it must be a function that raises EngineError"):
        Runner(steps, an_agent(), engine_check="vllm")


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        (3, "scenarios must be art_gym.Scenario objects, not 3: write Scenario"),
        (("s", 3), "scenarios must be art_gym.Scenario objects, not "),
        (Scenario("s", -1), "scenario 's' has the seed -1; it must be a whole number of at least 0"),
        (Scenario("s", None), "scenario 's' has the seed None; it must be"),
        (Scenario("s", 1.0), "scenario 's' has the seed 1.0; it must be"),
        (Scenario("s", 1, None), "scenario 's' has the options None; they must be a mapping"),
    ],
    ids=repr,
)
async def test_what_is_no_scenario_stops_the_rollout(steps, an_agent, play, scenario, words):
    with pytest.raises(UsageError, match=words):
        await play(Runner(steps, an_agent()), [scenario])


@pytest.mark.parametrize("starts", [None, 3, Scenario("s", 1)], ids=lambda value: type(value).__name__)
async def test_scenarios_are_an_iterable(steps, an_agent, play, starts):
    with pytest.raises(UsageError, match=rf"scenarios must be an iterable of art_gym\.Scenario objects, not {re.escape(repr(starts))}"):
        await play(Runner(steps, an_agent()), starts)


async def test_a_journal_is_one(steps, an_agent, play, scenarios, open_store, tmp_path):
    for journal in (tmp_path, str(tmp_path), open_store()):
        with pytest.raises(UsageError, match=r"journal must be a Journal, such as EpisodeStore\(folder\)\.journal\(label\), not "):
            await play(Runner(steps, an_agent()), scenarios(), journal=journal)


async def test_a_progress_has_its_method(steps, an_agent, play, scenarios):
    for progress in (print, show_progress("eval")):
        with pytest.raises(UsageError, match=r"progress must have on_episode\(episode\), as what `with show_progress"):
            await play(Runner(steps, an_agent()), scenarios(), progress=progress)


def test_environment_arguments_are_a_mapping(an_agent):
    with pytest.raises(UsageError, match="env_kwargs must be a mapping of the environment's arguments, not 3"):
        Runner("art_gym/GuessNumber-v0", an_agent(), env_kwargs=3)


def test_a_function_takes_no_environment_arguments(steps, an_agent):
    with pytest.raises(UsageError, match="env_kwargs go with"):
        Runner(steps, an_agent(), env_kwargs={"size": 3})


@pytest.mark.parametrize("priority", ["high", None, 1.5, True])
def test_a_priority_is_a_number(steps, an_agent, priority):
    with pytest.raises(UsageError, match="priority"):
        Runner(steps, an_agent(), priority=priority)
