"""Scripted and random agents, and the warm start's scripts."""

import json

import numpy as np
import pytest

from art_gym import Runner, call, make, say
from art_gym.errors import UsageError
from art_gym_agents import RandomAgent, ScriptedAgent
from art_gym_agents.warmstart import SCRIPTS, random_searcher, script_for

MAILS = "From Ana: the flight gate is B12.\nFrom Ben: the flight gate is C34.\n(+2 more)"


def arguments(action):
    (only,) = action["tool_calls"]
    return only["function"]["name"], json.loads(only["function"]["arguments"])


async def test_a_script_may_return_an_action_or_text_and_may_wait(make_state):
    async def waiting(state):
        return call("guess", number=4)

    assert (await ScriptedAgent(lambda state: "Hello.").act(make_state())).action == say("Hello.")
    assert arguments((await ScriptedAgent(waiting).act(make_state())).action) == ("guess", {"number": 4})


async def test_a_scripted_agent_is_named_after_its_function_and_records_it(make_state):
    def counts_up(state):
        return call("guess", number=state.turn + 1)

    assert ScriptedAgent(counts_up).name == "counts_up"
    assert (await ScriptedAgent(counts_up, name="counter").act(make_state())).policy == "counter"


async def test_the_random_agent_plays_the_same_for_an_equal_scenario_and_member(make_state):
    agent = RandomAgent()

    async def three(**which):
        state = make_state(**which)
        return [arguments((await agent.act(state)).action) for _ in range(3)]

    first = await three(seed=1)
    assert first == await three(seed=1)
    assert first != await three(seed=1, member=1)
    assert all(name == "guess" and 1 <= given["number"] <= 16 for name, given in first)


async def test_the_random_agent_leaves_the_environments_space_alone(make_state):
    state, untouched = make_state(), make_state()
    for space in (state.action_space, untouched.action_space):
        space.seed(3)
    await RandomAgent().act(state)
    assert state.action_space.sample() == untouched.action_space.sample()


def test_the_guesser_guesses_every_number_of_the_range_and_no_other(make_state):
    script = script_for("art_gym/GuessNumber-v0")
    guesses = {arguments(script(make_state(seed=seed)))[1]["number"] for seed in range(300)}
    assert guesses == set(range(1, 17))


def asked(results=()):
    messages = [{"role": "system", "content": "Search."}, {"role": "user", "content": "What is Ana's flight gate?"}]
    for result in results:
        messages += [call("search", word="x"), {"role": "tool", "tool_call_id": "call_0", "content": result}]
    return messages


def test_the_searcher_begins_with_any_word_of_the_question(make_state):
    words = [arguments(random_searcher(make_state(asked(), seed=seed))) for seed in range(100)]
    assert {name for name, _ in words} == {"search"}
    assert {given["word"] for _, given in words} == {"What", "is", "Ana", "flight", "gate"}


def test_the_searcher_mostly_answers_what_any_shown_mail_says(make_state):
    actions = [arguments(random_searcher(make_state(asked([MAILS]), seed=seed))) for seed in range(200)]
    answers = [given["value"] for name, given in actions if name == "answer"]
    assert set(answers) == {"B12", "C34"}
    # Nine in ten; 20 searches are expected, and 40 are five standard deviations away.
    assert 0 < 200 - len(answers) < 40


def test_the_searcher_searches_on_while_it_has_seen_no_mail(make_state):
    state = make_state(asked(["No mail has that word."]))
    words = [arguments(random_searcher(state))[1]["word"] for _ in range(5)]
    assert sorted(words) == ["Ana", "What", "flight", "gate", "is"]
    assert arguments(random_searcher(state))[0] == "search"


def test_an_environment_without_a_script_is_an_error_that_lists_those_with_one():
    with pytest.raises(UsageError, match="no warm-start script for x/Y-v0; those with one are: art_gym/GuessNumber-v0, art_gym/Lookup-v0"):
        script_for("x/Y-v0")
    assert script_for("art_gym_envs:art_gym/Lookup-v0") is random_searcher


@pytest.mark.parametrize("env_id", SCRIPTS)
def test_the_scripts_make_valid_calls_only_and_do_not_play_well(env_id):
    scenarios = list(make(env_id).unwrapped.scenarios("validation", 200))
    groups = Runner(env_id, ScriptedAgent(script_for(env_id))).collect(scenarios)
    episodes = [episode for group in groups for episode in group.finished]
    assert len(episodes) == 200
    assert sum(turn.invalid_calls for episode in episodes for turn in episode.turns) == 0
    # Chance: 5 guesses of 16 with repetition make 1 - (15/16)**5 = 0.28; a search shows the right mail at most half the time, then 1 of 3.
    assert 0.02 < np.mean([episode.success for episode in episodes]) < 0.4
