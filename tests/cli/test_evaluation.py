"""Counting the outcomes of an evaluation, and playing one."""

import asyncio
import json
import re
import threading
from itertools import islice

import gymnasium
import pytest

from art_gym import Episode, EpisodeGroup, Failure, Scenario, ToolEnv, Turn, call, make, tool
from art_gym._tally import Tally, powers
from art_gym.errors import TooManyFailures, UsageError
from art_gym.evaluation import Evaluation, ScenarioOutcome, Spread, Tokens, evaluate, is_played
from art_gym.statistics import rate_interval
from art_gym.store import EpisodeStore
from art_gym_agents import ScriptedAgent

GUESS = "art_gym/GuessNumber-v0"
BROKEN = "tests/NoNumber-v0"


class NoNumber(ToolEnv):
    """Its rewards are NaN."""

    def step(self, action):
        observation, _, terminated, truncated, info = super().step(action)
        return observation, float("nan"), terminated, truncated, info

    @tool
    def guess(self, number: int) -> str:
        """Guess."""
        return "Wrong."


@pytest.fixture(autouse=True, scope="module")
def broken():
    gymnasium.register(BROKEN, entry_point=NoNumber)
    yield
    gymnasium.registry.pop(BROKEN)


def episode(*rewards: float, invalid: int = 0, failure: str | None = None, tokens=None, **kwargs) -> Episode:
    ids = {} if tokens is None else {"prompt_ids": [0] * tokens[0], "completion_ids": [0] * tokens[1]}
    turns = [
        Turn([], call("guess", number=1), reward=reward, invalid_calls=invalid, policy_seconds=2.0, environment_seconds=0.5, **ids)
        for reward in rewards
    ]
    kind = Failure(failure, f"{failure} broke") if failure else None
    return Episode(kwargs.pop("id", "e"), "a/B-v0", Scenario("s", seed=0), turns=turns, failure=kind, **kwargs)


def counted(*groups: list[Episode], k: int = 1, seconds: float = 0.0, kept=()) -> Evaluation:
    tally = Tally(k, kept=kept)
    for number, episodes in enumerate(groups):
        tally.add(EpisodeGroup(Scenario(f"s{number}", seed=number), episodes))
    return tally.evaluation(env_id="a/B-v0", agent="someone", seconds=seconds)


def test_outcomes_are_counted():
    episodes = [
        episode(0.0, 1.0, metrics={"success": 1.0}, terminated=True, seconds=6.0),
        episode(0.2, 0.0, 0.0, 0.0, metrics={"success": 0.0}, truncated=True, truncation="max_turns", invalid=2, seconds=8.0),
        episode(1.0, failure="policy"),
        episode(failure="environment"),
        episode(failure="policy"),
    ]
    result = counted(*([one] for one in episodes), seconds=2.5)
    assert (result.n, result.successes, result.rate) == (5, 1, 0.2)
    # Of the two that did not fail: (1.0 + 0.2) / 2 and (2 + 4) / 2.
    assert result.mean_reward == pytest.approx(0.6)
    assert result.mean_turns == 3.0
    assert result.turn_counts == {2: 1, 4: 1}
    assert (result.turns.p50, result.turns.max) == (3.0, 4.0)
    assert result.invalid_calls == 8
    assert (result.truncated, result.truncations) == (1, {"max_turns": 1})
    assert (result.failures, result.failed) == ({"policy": 2, "environment": 1}, 3)
    assert result.first_failure == "policy broke"
    assert result.failure_messages == {"policy": "policy broke", "environment": "environment broke"}
    # Wilson's interval for 1 of 5.
    assert (result.low, result.high) == (pytest.approx(0.0362, abs=1e-4), pytest.approx(0.6245, abs=1e-4))
    # Seven turns of 2 s and 0.5 s each; the episodes that finished took 6 s and 8 s.
    assert (result.policy_seconds.p99, result.environment_seconds.mean) == (2.0, 0.5)
    # Three failed, and count as long as the longest: (6 + 8 + 3 · 8) / 5.
    assert result.episode_seconds.mean == pytest.approx(7.6)
    assert (result.episode_seconds.count, result.episode_seconds.cut_off, result.cut_calls, result.cut_steps) == (5, 3, 2, 0)


def test_episodes_of_a_scenario_make_pass_at_k_and_pass_hat_k():
    won, lost = episode(1.0), episode(0.0)
    result = counted([won, won, lost, lost], [lost, lost, lost, lost], k=4)
    # First scenario, two of four: 1 - C(2,2)/C(4,2) = 5/6 and C(2,2)/C(4,2) = 1/6; the second has none.
    assert result.pass_at == {1: 0.25, 2: pytest.approx(5 / 12), 4: 0.5}
    assert result.pass_hat == {1: 0.25, 2: pytest.approx(1 / 12), 4: 0.0}
    assert result.scenarios[0] == ScenarioOutcome("s0", 0, episodes=4, successes=2, finished=4, reward=2.0)
    # Two scenarios say less than their eight episodes, and the rate's one interval knows.
    assert 2 < result.effective_n < 8
    assert result.interval == (result.low, result.high) == rate_interval([2, 0], [4, 4])
    # Student's with one degree of freedom, 12.706, around the mean of 1/2 and 0, whose standard error is 1/4.
    assert result.reward_interval == (pytest.approx(0.25 - 12.7062 / 4, rel=1e-4), pytest.approx(0.25 + 12.7062 / 4, rel=1e-4))


def test_a_failed_episode_is_no_success_and_no_reward():
    result = counted([episode(1.0), episode(1.0, failure="engine")], k=2)
    assert (result.rate, result.mean_reward) == (0.5, 1.0)
    assert result.pass_at == {1: 0.5, 2: 1.0}
    assert result.scenarios[0].finished == 1


def test_ks_are_the_powers_of_two_and_k_itself():
    assert powers(1) == [1]
    assert powers(8) == [1, 2, 4, 8]
    assert powers(12) == [1, 2, 4, 8, 12]


def test_tokens_are_counted_where_they_are_known():
    known, unknown = episode(0.0, 0.0, tokens=(100, 10)), episode(0.0)
    result = counted([known], [unknown], [episode(0.0, tokens=(50, 4))], seconds=2.0)
    # Two turns of 100 and 10, one of 50 and 4; by the second: 24 / 2.
    assert result.tokens == Tokens(
        prompt=250, completion=24, prompt_mean=125.0, completion_mean=12.0, completion_per_second=12.0, unknown_turns=1
    )
    assert counted([unknown]).tokens is None


def test_episodes_from_before_tell_nothing_of_the_speed():
    before, now = episode(0.0, tokens=(9, 30), id="a"), episode(0.0, tokens=(9, 10), id="b")
    assert counted([before], [now], seconds=5.0, kept={"a"}).tokens.completion_per_second == 2.0
    assert counted([before], seconds=5.0, kept={"a"}).tokens.completion_per_second is None


def test_none_and_only_failures_are_defined():
    nothing = counted()
    assert (nothing.rate, nothing.turns, nothing.interval, nothing.pass_at) == (0.0, None, (0.0, 1.0), {1: 0.0})
    failed = counted([episode(failure="engine")])
    assert (failed.mean_reward, failed.mean_turns, failed.rate) == (0.0, 0.0, 0.0)
    assert failed.reward_interval is None


def test_it_goes_through_json_unchanged():
    result = counted([episode(1.0, tokens=(3, 2)), episode(failure="policy")], [episode(0.0), episode(0.5)], k=2, seconds=1.0)
    assert Evaluation.from_dict(json.loads(json.dumps(result.to_dict()))) == result
    assert Evaluation.from_dict(json.loads(json.dumps(counted().to_dict()))) == counted()


def test_what_an_earlier_version_wrote_is_read():
    old = {"env_id": "a/B-v0", "agent": "x", "n": 4, "successes": 1, "low": 0.1, "high": 0.5, "mean_reward": 0.2, "mean_turns": 2.0}
    old |= {"invalid_calls": 0, "truncated": 1, "failures": {}, "first_failure": "", "seconds": 3.0, "rate": 0.25}
    result = Evaluation.from_dict(old)
    assert (result.successes, result.k, result.pass_at, result.tokens) == (1, 1, {}, None)
    with pytest.raises(KeyError):
        Evaluation.from_dict({"env_id": "a/B-v0"})


def test_it_reads_as_a_sentence():
    result = Evaluation("a/B-v0", "x", n=148, successes=15, low=0.0624, high=0.1605, mean_reward=0, mean_turns=0, invalid_calls=0)
    assert str(result) == "10.1% (15 of 148, 95% interval 6.2% to 16.1%)"


def test_percentiles_are_interpolated():
    # Of 0, 1, … 10 the 90th percentile is 9, and the 99th lies nine tenths of the way from 9 to 10.
    spread = Spread.of([float(value) for value in range(11)])
    assert not any(map(spread.is_bound, ("mean", "p50", "p90", "p99", "max")))
    assert (spread.mean, spread.p50, spread.p90, spread.max) == (5.0, 5.0, 9.0, 10.0)
    assert spread.p99 == pytest.approx(9.9)
    assert Spread.of([]) is None


def test_what_was_cut_off_makes_nothing_look_faster():
    # Ninety calls of 1 s, nine of 5 s, one that timed out: of 100 the 90th percentile lies between the 90th and the 91st.
    spread = Spread.of([1.0] * 90 + [5.0] * 9, cut_off=1)
    assert (spread.p50, spread.is_bound("p50")) == (1.0, False)
    assert (spread.p90, spread.is_bound("p90")) == (pytest.approx(1.4), False)
    assert (spread.p99, spread.is_bound("p99"), spread.is_bound("mean"), spread.is_bound("max")) == (5.0, True, True, True)
    # Half of them hung: the median is no less than what was measured at the longest.
    spread = Spread.of([0.1, 0.2], cut_off=3)
    assert (spread.p50, spread.is_bound("p50")) == (0.2, True)
    assert Spread.of([], cut_off=3) is None


def test_calls_and_steps_that_were_cut_off_are_counted():
    hung = Failure("tool_timeout", "hung", action=call("guess", number=1))
    step = Episode("e", "a/B-v0", Scenario("s", seed=0), failure=hung)
    at_reset = Episode("f", "a/B-v0", Scenario("s", seed=0), failure=Failure("environment", "broke"))
    result = counted([episode(0.0)], [step], [at_reset], [episode(0.0, failure="policy")])
    assert (result.cut_calls, result.cut_steps) == (1, 1)
    assert (result.policy_seconds.count, result.policy_seconds.cut_off) == (3, 1)
    assert (result.environment_seconds.count, result.environment_seconds.cut_off) == (3, 1)


def counts_up(**kwargs) -> ScriptedAgent:
    return ScriptedAgent(lambda state: call("guess", number=state.turn + 1), name="counts up")


# Among three numbers and in three turns, counting up always finds it.
EASY = {"high": 3, "max_turns": 3}


def test_each_scenario_is_played_k_times_and_kept(tmp_path):
    scenarios = [Scenario(f"s{seed}", seed=seed) for seed in range(6)]
    journal = EpisodeStore(tmp_path).journal("eval")
    options = {"env_kwargs": EASY, "journal": journal, "k": 2}
    result = evaluate(GUESS, counts_up(), scenarios, **options)
    assert (result.n, result.successes, result.k, result.agent) == (12, 12, 2, "counts up")
    played = list(journal.read())
    assert sorted((episode.scenario.id, episode.member) for episode in played) == [(s.id, member) for s in scenarios for member in (0, 1)]
    assert result.mean_turns == sum(len(episode.turns) for episode in played) / 12
    assert [outcome.id for outcome in result.scenarios] == [scenario.id for scenario in scenarios]

    again = evaluate(GUESS, counts_up(), scenarios, resume=True, **options)
    assert (again.n, again.successes, again.mean_turns, again.scenarios) == (result.n, result.successes, result.mean_turns, result.scenarios)
    assert len(list(journal.read())) == 12


def test_by_default_the_first_scenarios_of_the_test_split_are_played():
    result = evaluate(GUESS, counts_up(), n=3, env_kwargs=EASY)
    expected = islice(make(GUESS).unwrapped.scenarios("test"), 3)
    assert [(outcome.id, outcome.seed) for outcome in result.scenarios] == [(scenario.id, scenario.seed) for scenario in expected]
    with pytest.raises(UsageError, match="give n, or scenarios of your own"):
        evaluate(GUESS, counts_up(), [Scenario("s", 0)], n=3)


def test_what_is_left_to_play_is_known_from_the_journal(tmp_path):
    journal = EpisodeStore(tmp_path).journal("eval")
    assert not is_played(journal, 2, 2)
    evaluate(GUESS, counts_up(), n=2, k=2, env_kwargs=EASY, journal=journal)
    assert is_played(journal, 2, 2)
    assert not is_played(journal, 3, 2)
    assert not is_played(journal, 2, 3)
    # A failed episode is played again.
    journal.append(episode(failure="policy", id="eval/1/0"))
    assert not is_played(journal, 2, 2)


def fails_on(*turns: int) -> ScriptedAgent:
    """Fails when it is asked for so many-th time; else counts up."""
    asked = iter(range(10_000))

    def script(state):
        if next(asked) in turns:
            raise RuntimeError("no idea")
        return call("guess", number=state.turn + 1)

    return ScriptedAgent(script, name="counts up")


def test_failed_episodes_are_played_again_and_the_attempts_told(tmp_path):
    journal = EpisodeStore(tmp_path).journal("eval")
    options = {"n": 4, "env_kwargs": EASY, "journal": journal}
    first = evaluate(GUESS, fails_on(0), **options)
    assert (first.failures, first.attempts, first.replayed) == ({"policy": 1}, 4, {})
    second = evaluate(GUESS, fails_on(0), resume=True, **options)
    assert (second.failures, second.attempts, second.replayed) == ({"policy": 1}, 5, {"policy": 1})
    third = evaluate(GUESS, counts_up(), resume=True, **options)
    assert (third.failures, third.successes, third.attempts, third.replayed) == ({}, 4, 6, {"policy": 2})
    # Nothing is left; what there was is still told.
    assert evaluate(GUESS, counts_up(), resume=True, **options).replayed == {"policy": 2}


@pytest.mark.parametrize("watched", [False, True])
def test_failed_episodes_stand_if_that_is_asked(tmp_path, watched):
    class Watcher:
        failures = 0

        def on_episode(self, episode):
            self.failures += episode.failure is not None

    journal, watcher = EpisodeStore(tmp_path).journal("eval"), Watcher()
    options = {"n": 4, "env_kwargs": EASY, "journal": journal}
    first = evaluate(GUESS, fails_on(0), **options)
    assert is_played(journal, 4, 1, keep_failures=True)
    assert not is_played(journal, 4, 1)
    options |= {"resume": True, "keep_failures": True, "progress": watcher if watched else None}
    again = evaluate(GUESS, counts_up(), **options)
    assert (again.failures, again.scenarios, again.attempts) == (first.failures, first.scenarios, 4)
    assert watcher.failures == watched
    # They count as failures, whoever watches.
    with pytest.raises(TooManyFailures, match="1 of 4"):
        evaluate(GUESS, counts_up(), max_failure_rate=0.1, **options)
    # An episode that was interrupted is played all the same.
    journal.append(episode(failure="cancelled", id="eval/3/0"))
    assert not is_played(journal, 4, 1, keep_failures=True)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"agent": "another"}, "with agent 'counts up', and now it is 'another'"),
        ({"env_kwargs": {**EASY, "high": 2}}, "with env_kwargs {'high': 3, 'max_turns': 3}, and now it is {'high': 2, 'max_turns': 3}"),
        ({"split": "validation"}, "with split 'test', and now it is 'validation'"),
        ({"played_by": {"model": "a", "digest": "2"}}, "with digest '1', and now it is '2'"),
        ({"played_by": {"model": "b", "digest": "1"}}, "with model 'a', and now it is 'b'"),
        ({"played_by": {"model": "a", "temperature": 0.5}}, "with temperature None, and now it is 0.5"),
    ],
)
def test_a_journal_of_somebody_or_something_else_is_refused(tmp_path, changed, what):
    journal = EpisodeStore(tmp_path).journal("eval")
    options = {"n": 2, "env_kwargs": EASY, "journal": journal, "played_by": {"model": "a", "digest": "1"}}
    evaluate(GUESS, counts_up(), **options)
    before = journal.path.read_bytes()
    agent = ScriptedAgent(lambda state: call("guess", number=1), name=changed.pop("agent", "counts up"))
    with pytest.raises(UsageError, match=re.escape(what)) as refused:
        evaluate(GUESS, agent, resume=True, **{**options, "n": 3, **changed})
    assert "resume with the same, or play anew in another folder" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert journal.path.read_bytes() == before


def test_who_played_is_in_the_result_and_remembered(tmp_path):
    journal = EpisodeStore(tmp_path).journal("eval")
    options = {"n": 2, "env_kwargs": EASY, "journal": journal}
    played_by = {"model": "a", "step": 3}
    result = evaluate(GUESS, counts_up(), played_by=played_by, concurrency=2, **options)
    assert (result.played_by, result.split, result.env_kwargs, result.concurrency) == (played_by, "test", EASY, (2,))
    # What isn't known any more isn't compared.
    again = evaluate(GUESS, counts_up(), resume=True, **options)
    assert (again.played_by, again.concurrency) == (played_by, (2,))
    more = evaluate(GUESS, counts_up(), resume=True, concurrency=5, **{**options, "n": 3})
    assert (more.played_by, more.concurrency) == (played_by, (2, 5))


def test_a_reward_that_is_no_number_fails_its_episode_and_says_so():
    result = evaluate(BROKEN, counts_up(), n=2)
    assert result.failures == {"environment": 2}
    assert "reward must be finite, not nan" in result.first_failure
    assert (result.mean_reward, result.reward_interval) == (0.0, None)


def test_an_evaluation_in_which_too_many_fail_is_given_up():
    def fails(state):
        raise RuntimeError("no idea")

    with pytest.raises(TooManyFailures):
        evaluate(GUESS, ScriptedAgent(fails), n=50, max_failure_rate=0.5)


async def test_it_works_where_an_event_loop_runs():
    assert asyncio.get_running_loop().is_running()
    assert evaluate(GUESS, counts_up(), n=2, env_kwargs=EASY).successes == 2
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("art_gym ")] == []


def test_no_k_below_one():
    with pytest.raises(UsageError, match="must be a whole number of at least 1"):
        evaluate(GUESS, counts_up(), n=2, k=0)
