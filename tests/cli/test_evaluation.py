"""Counting the outcomes of an evaluation."""

import pytest

from art_gym import Episode, Failure, Scenario, Turn, call
from art_gym.cli.evaluation import Evaluation, evaluate
from art_gym.store import EpisodeStore


def episode(*rewards: float, invalid: int = 0, failure: str | None = None, **kwargs) -> Episode:
    turns = [Turn([], call("guess", number=1), reward=reward, invalid_calls=invalid) for reward in rewards]
    kind = Failure(failure, f"{failure} broke") if failure else None
    return Episode("e", "a/B-v0", Scenario("s", seed=0), turns=turns, failure=kind, **kwargs)


def test_outcomes_are_counted():
    episodes = [
        episode(0.0, 1.0, metrics={"success": 1.0}, terminated=True),
        episode(0.2, 0.0, 0.0, 0.0, metrics={"success": 0.0}, truncated=True, invalid=2),
        episode(1.0, failure="policy"),
        episode(failure="environment"),
        episode(failure="policy"),
    ]
    result = Evaluation.of(episodes, env_id="a/B-v0", agent="someone", seconds=2.5)
    assert (result.n, result.successes, result.rate) == (5, 1, 0.2)
    # Of the two that did not fail: (1.0 + 0.2) / 2 and (2 + 4) / 2.
    assert result.mean_reward == pytest.approx(0.6)
    assert result.mean_turns == 3.0
    assert result.invalid_calls == 8
    assert result.truncated == 1
    assert result.failures == {"policy": 2, "environment": 1}
    assert result.first_failure == "policy broke"
    # Wilson's interval for 1 of 5.
    assert (result.low, result.high) == (pytest.approx(0.0362, abs=1e-4), pytest.approx(0.6245, abs=1e-4))


def test_none_and_only_failures_are_defined():
    assert Evaluation.of([], env_id="a/B-v0", agent="x").rate == 0.0
    failed = Evaluation.of([episode(failure="engine")], env_id="a/B-v0", agent="x")
    assert (failed.mean_reward, failed.mean_turns, failed.rate) == (0.0, 0.0, 0.0)


def test_it_goes_through_a_dictionary_unchanged():
    result = Evaluation.of([episode(1.0), episode(failure="policy")], env_id="a/B-v0", agent="x", seconds=1.0)
    assert Evaluation.from_dict(result.to_dict()) == result


def test_it_reads_as_a_sentence():
    result = Evaluation("a/B-v0", "x", n=148, successes=15, low=0.0624, high=0.1605, mean_reward=0, mean_turns=0, invalid_calls=0)
    assert str(result) == "10.1% (15 of 148, 95% interval 6.2% to 16.1%)"


def test_each_scenario_is_played_once_and_kept(tmp_path):
    from art_gym_agents import ScriptedAgent

    agent = ScriptedAgent(lambda state: call("guess", number=state.turn + 1), name="counts up")
    scenarios = [Scenario(f"s{seed}", seed=seed) for seed in range(6)]
    journal = EpisodeStore(tmp_path).journal("eval")
    # Among three numbers and in three turns, counting up always finds it.
    options = {"env_kwargs": {"high": 3, "max_turns": 3}, "journal": journal}
    result = evaluate("art_gym/GuessNumber-v0", agent, scenarios, **options)
    assert (result.n, result.successes, result.agent) == (6, 6, "counts up")
    played = list(journal.read())
    assert sorted(episode.scenario.id for episode in played) == [scenario.id for scenario in scenarios]
    assert result.mean_turns == sum(len(episode.turns) for episode in played) / 6

    again = evaluate("art_gym/GuessNumber-v0", agent, scenarios, resume=True, **options)
    assert (again.n, again.successes, again.mean_turns) == (result.n, result.successes, result.mean_turns)
    assert len(list(journal.read())) == 6
