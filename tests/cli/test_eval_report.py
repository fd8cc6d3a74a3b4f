"""How an evaluation reads, from outcomes that are made up."""

from dataclasses import replace

import pytest

from art_gym import Episode, EpisodeGroup, Failure, Scenario, Turn, call
from art_gym._tally import Tally
from art_gym.cli._eval_report import draw, markdown, summary
from art_gym.cli._eval_settings import AgentSetting, Settings
from art_gym.comparison import Comparison
from art_gym.evaluation import Evaluation, Spread
from art_gym.statistics import rate_interval

SETTINGS = Settings("a/B-v0", (AgentSetting("x", "random"),), env_kwargs={"high": 3}, n=4, k=2, temperature=0.7)


def outcome(agent: str, wins: list[int], *, k: int = 2, tokens: bool = False, failure: str = "") -> Evaluation:
    """So many successes in each scenario, the others lost; or all of them failed."""
    ids = {"prompt_ids": [0] * 50, "completion_ids": [0] * 10} if tokens else {}
    tally = Tally(k)
    for number, won in enumerate(wins):
        scenario = Scenario(f"s{number}", number)
        episodes = [
            Episode(
                f"{number}/{member}",
                "a/B-v0",
                scenario,
                member,
                turns=[Turn([], call("go"), reward=float(member < won), policy_seconds=1.5, environment_seconds=0.002, **ids)],
                truncated=member >= won,
                truncation="max_turns" if member >= won else None,
                failure=Failure("policy", failure) if failure else None,
                seconds=2.0,
            )
            for member in range(k)
        ]
        tally.add(EpisodeGroup(scenario, episodes))
    return tally.evaluation(env_id="a/B-v0", agent=agent, seconds=10.0)


def test_a_block_has_every_figure():
    lines = dict(line.split(maxsplit=1) for line in summary(Comparison.of([outcome("x", [2, 1, 0, 1], tokens=True)])).splitlines())
    # Four of eight; pass@2 is 1, 1, 0, 1 over the scenarios, and pass^2 is 1, 0, 0, 0. Of four draws
    # with a chance of 3/4, none succeeds in 0.4% and at most one in 5.1% of cases, and all do in 32%.
    assert lines["pass@k"] == "1: 50.0%, 2: 75.0% (25.0% to 100.0%)"
    assert lines["pass^k"] == "1: 50.0%, 2: 25.0% (0.0% to 75.0%)"
    # Eight turns of 50 and 10 tokens in 10 s.
    assert lines["tokens"] == "400 of prompts, 80 sampled, 50 and 10 an episode, 8 sampled a second"
    assert lines["policy"] == "call    p50 1.50 s, p90 1.50 s, p99 1.50 s"
    assert lines["tool"] == "step      p50 2 ms, p90 2 ms, p99 2 ms"
    assert lines["truncated"] == "4 (max_turns)"
    assert lines["success"].startswith("50.0% (4 of 8, 95% interval ")
    assert lines["scenarios"].startswith("4, 2 episodes each, which say as much as ")


def test_once_played_there_is_no_pass_at_k_and_no_second_interval():
    text = summary(Comparison.of([outcome("x", [1, 0], k=1)]))
    assert "pass@k" not in text
    assert "scenarios" not in text
    # The same bounds everywhere: Wilson's for 1 of 2.
    assert "95% interval 9.5% to 90.5%" in text


def test_the_interval_is_the_same_in_the_table_on_the_screen_and_in_json():
    result = outcome("x", [2, 2, 0, 0, 1, 0])
    low, high = rate_interval([2, 2, 0, 0, 1, 0], [2] * 6)
    shown = f"{low:.1%} to {high:.1%}"
    assert f"95% interval {shown})" in summary(Comparison.of([result]))
    assert f"| x | 41.7% | 12 | {shown} |" in markdown(Comparison.of([result]), SETTINGS)
    assert (result.to_dict()["low"], result.to_dict()["high"]) == (low, high)


def test_calls_that_were_cut_off_are_told():
    result = replace(
        outcome("x", [1, 0], k=1), policy_seconds=Spread.of([1.0] * 9, cut_off=1), cut_calls=1, environment_seconds=None, cut_steps=2
    )
    lines = summary(Comparison.of([result])).splitlines()
    assert "policy call    p50 1.00 s, p90 ≥ 1.00 s, p99 ≥ 1.00 s, 1 cut off" in lines
    assert "tool step      2 cut off" in lines
    text = markdown(Comparison.of([result]), SETTINGS)
    assert "| x | policy call | ≥ 1.00 s | 1.00 s | ≥ 1.00 s | ≥ 1.00 s | ≥ 1.00 s | 1 |" in text
    assert "| x | tool step | – | – | – | – | – | 2 |" in text


def test_who_played_is_told():
    result = replace(outcome("x", [1, 0]), played_by={"model": "first@3", "spec": "runs/first", "step": 3, "digest": "abc"})
    assert "played by      runs/first, model first@3, step 3, digest abc\n" in summary(Comparison.of([result]))
    assert "| x | runs/first, model first@3, step 3, digest abc |" in markdown(Comparison.of([result]), SETTINGS)


def test_a_reward_comparison_tells_its_own_scenarios_and_what_was_left_out():
    first, second = outcome("x", [1] * 60, k=1), outcome("y", [1] * 59 + [0], k=1)
    lost = replace(second.scenarios[-1], finished=0, reward=0.0)
    second = replace(second, scenarios=(*second.scenarios[:-1], lost))
    result = Comparison.of([first, second])
    text = markdown(result, SETTINGS)
    assert "| y against x | success | -1.7 points |" in text
    assert "| 60 | McNemar's exact test, 0 won against 1 lost |" in text
    assert "| y against x | reward | +0.000 | no interval | 1.000 | 59 | no scenario differs |" in text
    assert "- y against x: without reward, failed or unpaired: 1 of 60 and 1 of 60 episodes" in text
    assert "no scenario differs; 59 scenarios; without reward, failed or unpaired: 1 of 60 and 1 of 60 episodes" in summary(result)


def test_markdown_tells_the_settings_and_each_figure_once():
    text = markdown(Comparison.of([outcome("x", [2, 1, 0, 1], tokens=True)]), SETTINGS)
    assert "4 scenarios of the test split (high=3), each played 2 times; chat models with temperature 0.7 and at most 64 tokens" in text
    assert "| agent | pass@1 | pass@2 | pass^1 | pass^2 |" in text
    assert "| x | 50.0% | 75.0% (25.0% to 100.0%) | 50.0% | 25.0% (0.0% to 75.0%) |" in text
    assert "| x | 0.500 |" in text
    assert "| 50 | 10 | 8 |" in text
    assert "## Differences" not in text


def test_pairs_of_more_than_two_agents_have_corrected_p_values():
    two = [outcome("x", [2, 2, 2, 2]), outcome("y", [0, 0, 0, 0])]
    text = markdown(Comparison.of(two), SETTINGS)
    # 2 of the 2⁴ patterns.
    assert "| y against x | success | -100.0 points | no interval | 0.125 | 4 | sign-flip permutation test, all 16 patterns |" in text
    assert "Holm" not in text
    text = markdown(Comparison.of([*two, outcome("z", [0, 0, 0, 0])]), SETTINGS)
    assert "| y against x | success | -100.0 points | no interval | 0.125 | 0.375 | 4 |" in text
    assert "| z against y | success | +0.0 points | no interval | 1.000 | 1.000 | 4 | no scenario differs |" in text
    assert "p = 0.125 (0.375 after Holm's correction)" in summary(Comparison.of([*two, outcome("z", [0, 0, 0, 0])]))


def test_what_a_model_or_a_server_wrote_breaks_no_table():
    text = markdown(Comparison.of([outcome("a|b", [0, 0], failure="first line\nsecond | line " + "x" * 500)]), SETTINGS)
    assert "| a\\|b | 0.0% |" in text
    (line,) = [line for line in text.splitlines() if line.startswith("- a|b, policy: first line second | line xxx")]
    assert line.endswith("x…")


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2])
def test_outcomes_without_any_finished_episode_are_drawn_too(tmp_path, k):
    pytest.importorskip("matplotlib")
    result = Comparison.of([outcome("x", [0, 0], k=k, failure="broke"), outcome("y", [1, 0], k=k)])
    assert draw(result, tmp_path / "evaluation.png") == ""
    assert [path.name for path in tmp_path.iterdir()] == ["evaluation.png"]
