"""When too many episodes fail, the rollout ends and says of what."""

import pytest

from art_gym.episodes import Episode, Failure
from art_gym.errors import TooManyFailures, UsageError
from art_gym.rollout import Runner
from art_gym.rollout.failures import FailureCount
from art_gym.scenarios import Scenario


def failing(*numbers, kind=ValueError):
    return lambda state: kind(f"scenario {state.scenario.seed}") if state.scenario.seed in numbers else None


async def test_a_rollout_ends_when_more_fail_than_may(steps, an_agent, scenarios, open_store):
    journal = open_store().journal("a")
    runner = Runner(steps, an_agent(odd=lambda state: ValueError("the endpoint is odd")), concurrency=1, max_failure_rate=0.25)
    groups = []

    async def played():
        async for group in runner.run(scenarios(1000), journal=journal):
            groups.append(group)

    with pytest.raises(TooManyFailures, match=r"6 of 6 episodes failed, more than the 0\.25 that max_failure_rate allows") as caught:
        await played()
    # A quarter of at least 20 episodes may fail: the sixth is one too many.
    assert "policy: 6, such as episode a/0/0 (scenario s0): ValueError: the endpoint is odd" in str(caught.value)
    assert 5 <= len(groups) <= 6
    recorded = journal.latest()
    assert sum(episode.failure is not None and episode.failure.kind == "policy" for episode in recorded.values()) == 6


async def test_few_failures_are_allowed_early_but_not_at_the_end(steps, an_agent, play, scenarios):
    runner = Runner(steps, an_agent(odd=failing(0, 1)), max_failure_rate=0.1)
    with pytest.raises(TooManyFailures, match="2 of 10"):
        await play(runner, scenarios(10))
    assert len(await play(runner, scenarios(20))) == 20


async def test_none_may_fail_with_a_rate_of_zero(steps, an_agent, play, scenarios):
    with pytest.raises(TooManyFailures, match="1 of "):
        await play(Runner(steps, an_agent(odd=failing(3)), max_failure_rate=0), scenarios(10))


async def test_kinds_have_limits_of_their_own(steps, an_agent, play):
    starts = [Scenario(f"s{number}", seed=number, options={"step": "raise"} if number < 5 else {}) for number in range(20)]
    agent = an_agent(odd=failing(10, 11))
    assert len(await play(Runner(steps, agent, concurrency=1, max_failure_rate={"environment": 0.25, "policy": 0.1}), starts)) == 20
    with pytest.raises(TooManyFailures, match=r"\(kind 'policy'\)") as caught:
        await play(Runner(steps, agent, concurrency=1, max_failure_rate={"policy": 0.05}), starts)
    assert "environment: 5, such as" in str(caught.value)


async def test_cut_episodes_do_not_count(steps, an_agent, play, scenarios):
    agent = an_agent(odd=lambda state: 30.0 if state.member else None)
    groups = await play(Runner(steps, agent, oversample=1, max_failure_rate=0), scenarios(5))
    assert [len(group.failed) for group in groups] == [1] * 5


@pytest.mark.parametrize("rate", [-0.1, 1.1, True, "half", float("nan"), {"polcy": 0.1}, {"policy": 2}, {"cancelled": 0.1}, {"engine": 0.1}])
def test_a_rate_is_a_share(steps, an_agent, rate):
    with pytest.raises(UsageError, match="max_failure_rate"):
        Runner(steps, an_agent(), max_failure_rate=rate)


def test_rates_are_exact_and_small_ones_wait_for_enough_episodes():
    def failed(number):
        return Episode(f"e{number}", "x", Scenario("s", 0), failure=Failure("policy", "no"))

    # 0.29 * 100 is a little less than 29 in floating point.
    count = FailureCount(0.29)
    for number in range(100):
        count.add(failed(number) if number >= 71 else Episode(f"e{number}", "x", Scenario("s", 0)))
    count.check()
    count = FailureCount(0.02)
    count.add(failed(0))
    with pytest.raises(TooManyFailures, match="2 of 2"):
        count.add(failed(1))
