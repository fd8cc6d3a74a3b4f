"""How an evaluation reads, from outcomes that are made up."""

import pytest

from art_gym import Episode, EpisodeGroup, Failure, Scenario, Turn, call
from art_gym._tally import Tally
from art_gym.cli._eval_report import draw, markdown, summary
from art_gym.cli._eval_settings import AgentSetting, Settings
from art_gym.comparison import Comparison
from art_gym.evaluation import Evaluation

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
    # Four of eight; pass@2 is 1, 1, 0, 1 over the scenarios, and pass^2 is 1, 0, 0, 0.
    assert lines["pass@k"] == "1: 50.0%, 2: 75.0%"
    assert lines["pass^k"] == "1: 50.0%, 2: 25.0%"
    # Eight turns of 50 and 10 tokens in 10 s.
    assert lines["tokens"] == "400 of prompts, 80 sampled, 50 and 10 an episode, 8 sampled a second"
    assert lines["policy"] == "call    p50 1.50 s, p90 1.50 s, p99 1.50 s"
    assert lines["tool"] == "step      p50 2 ms, p90 2 ms, p99 2 ms"
    assert lines["truncated"] == "4 (max_turns)"
    assert "over" in lines


def test_once_played_there_is_no_pass_at_k_and_no_second_interval():
    text = summary(Comparison.of([outcome("x", [1, 0], k=1)]))
    assert "pass@k" not in text
    assert "over scenarios" not in text


def test_markdown_tells_the_settings_and_each_figure_once():
    text = markdown(Comparison.of([outcome("x", [2, 1, 0, 1], tokens=True)]), SETTINGS)
    assert "4 scenarios of the test split (high=3), each played 2 times; chat models with temperature 0.7 and at most 64 tokens" in text
    assert "| agent | pass@1 | pass@2 | pass^1 | pass^2 |" in text
    assert "| x | 50.0% | 75.0% | 50.0% | 25.0% |" in text
    assert "| x | 0.500 |" in text
    assert "| 50 | 10 | 8 |" in text
    assert "## Differences" not in text


def test_pairs_of_more_than_two_agents_have_corrected_p_values():
    two = [outcome("x", [2, 2, 2, 2]), outcome("y", [0, 0, 0, 0])]
    text = markdown(Comparison.of(two), SETTINGS)
    # 2 of the 2⁴ patterns.
    assert "| y against x | success | -100.0 points | -100.0 to -100.0 | 0.125 | sign-flip permutation test, all 16 patterns |" in text
    assert "Holm" not in text
    text = markdown(Comparison.of([*two, outcome("z", [0, 0, 0, 0])]), SETTINGS)
    assert "| y against x | success | -100.0 points | -100.0 to -100.0 | 0.125 | 0.375 |" in text
    assert "| z against y | success | +0.0 points | +0.0 to +0.0 | 1.000 | 1.000 | no scenario differs |" in text
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
