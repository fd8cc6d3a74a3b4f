"""Failures: of the environment or of the agent, apart from the other episodes."""

import asyncio

import pytest

from art_gym.errors import PolicyError
from art_gym.messages import call
from art_gym.rollout import Reply, Runner


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"step": "raise"}, "environment", "ZeroDivisionError: a bug"),
        ({"step": "exit"}, "environment", "SystemExit(3)"),
        ({"reset": "raise"}, "environment", "no such mailbox"),
        ({"step": "own timeout"}, "environment", "the database"),
        ({"step": "nan"}, "environment", "reward must be finite, not nan"),
        ({"step": "tool timeout"}, "tool_timeout", "longer than 1 s"),
    ],
)
async def test_one_failing_episode_of_eight_leaves_seven_results(an_agent, play, mixed, any_steps, options, kind, words):
    groups = await play(Runner(any_steps, an_agent(), concurrency=3), mixed(8, {3}, **options))
    failures = {group.scenario.id: group.episodes[0].failure for group in groups if group.failed}
    assert list(failures) == ["s3"]
    assert failures["s3"].kind == kind
    assert words in failures["s3"].message
    assert "Traceback" in failures["s3"].traceback
    assert [group.finished[0].reward for group in groups if group.finished] == [1.0] * 7


async def test_a_failed_episode_keeps_the_turns_before(steps, an_agent, play, scenarios):
    ((group,),) = [await play(Runner(steps, an_agent()), scenarios(1, step="raise", at=3, turns=5))]
    assert [turn.reward for turn in group.episodes[0].turns] == [0.5, 0.5]


async def test_an_environment_that_cannot_be_made_fails_each_episode(an_agent, play, scenarios):
    def make():
        raise OSError("no browser")

    groups = await play(Runner(make, an_agent()), scenarios(3))
    assert [group.episodes[0].failure.message for group in groups] == ["OSError: no browser"] * 3


async def test_a_policy_error_fails_its_episode_only(steps, an_agent, play, scenarios):
    agent = an_agent(odd=lambda state: PolicyError("500 after 8 retries") if state.scenario.id == "s1" else None)
    groups = await play(Runner(steps, agent), scenarios(3))
    assert [group.episodes[0].failure and group.episodes[0].failure.kind for group in groups] == [None, "policy", None]


async def test_a_bug_in_the_agent_fails_its_episode_with_the_traceback(steps, an_agent, play, scenarios):
    agent = an_agent(odd=lambda state: IndexError("oops") if state.scenario.id == "s1" else None)
    groups = await play(Runner(steps, agent), scenarios(3))
    failure = groups[1].episodes[0].failure
    assert (failure.kind, failure.message) == ("policy", "IndexError: oops")
    assert "in act" in failure.traceback
    assert [group.finished[0].reward for group in (groups[0], groups[2])] == [1.0, 1.0]


@pytest.mark.parametrize("reply", [None, "go", call("go"), (call("go"), "stop")], ids=lambda reply: type(reply).__name__)
async def test_what_is_no_reply_is_a_failure_of_the_agent(any_steps, an_agent, play, scenarios, reply):
    agent = an_agent()

    async def act(state):
        return reply if state.scenario.id == "s1" else Reply(call("go"))

    agent.act = act
    groups = await play(Runner(any_steps, agent), scenarios(3))
    assert [group.episodes[0].truncation for group in groups] == [None, None, None]
    failure = groups[1].episodes[0].failure
    assert failure.kind == "policy"
    assert "the agent 'test agent' must return a Reply, such as Reply(call(…)), not " in failure.message
    assert repr(reply)[:50] in failure.message
    assert [group.finished[0].reward for group in (groups[0], groups[2])] == [1.0, 1.0]


class Weird(BaseException):
    """What code for one program only may raise, such as a test's own outcome."""


BASE = [Weird("odd"), SystemExit(3), asyncio.CancelledError(), StopIteration()]


@pytest.mark.parametrize("error", BASE, ids=lambda error: type(error).__name__)
async def test_whatever_an_agent_raises_fails_its_episode_only(any_steps, an_agent, play, scenarios, error):
    agent = an_agent(odd=lambda state: error if state.scenario.id == "s1" else None)
    groups = await asyncio.wait_for(play(Runner(any_steps, agent, concurrency=2), scenarios(4)), 10)
    assert [group.episodes[0].failure and group.episodes[0].failure.kind for group in groups] == [None, "policy", None, None]
    assert type(error).__name__ in groups[1].episodes[0].failure.message


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize("error", [*BASE, GeneratorExit()], ids=lambda error: type(error).__name__)
async def test_whatever_an_environment_raises_fails_its_episode_only(any_steps, an_agent, play, scenarios, where, error):
    class Odd(any_steps):
        def reset(self, *, seed=None, options=None):
            if where == "reset" and seed == 1:
                raise error
            return super().reset(seed=seed, options={"odd": seed == 1})

        def step(self, action):
            if where == "step" and self.options["odd"]:
                raise error
            return super().step(action)

    groups = await asyncio.wait_for(play(Runner(Odd, an_agent(), concurrency=2), scenarios(4)), 10)
    assert [group.episodes[0].failure and group.episodes[0].failure.kind for group in groups] == [None, "environment", None, None]
    assert type(error).__name__ in groups[1].episodes[0].failure.message


async def test_what_an_environment_raises_in_close_is_logged(any_steps, an_agent, play, scenarios, caplog):
    class Closing(any_steps):
        def close(self):
            super().close()
            raise SystemExit(4)

    groups = await play(Runner(Closing, an_agent()), scenarios(2))
    assert [len(group.finished) for group in groups] == [1, 1]
    assert "an environment raised in close()" in caplog.text
