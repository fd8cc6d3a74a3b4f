"""Which scenarios a run's batches play, with and without dynamic sampling, and after a kill: stages of a run without an engine or a model."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from art_gym import Scenario, say
from art_gym.cli import _standing
from art_gym.cli._train import _Run
from art_gym.cli.config import RunConfig
from art_gym.cli.report import read_metrics
from art_gym.episodes import Episode, EpisodeGroup, Failure, Turn
from art_gym.store import EpisodeStore
from art_gym_trainers.checkpoints import GRPO_STATE
from art_gym_trainers.statistics import BatchStatistics

pytestmark = [pytest.mark.train, pytest.mark.usefixtures("in_an_empty_folder")]


class Killed(Exception):
    pass


class Run(_Run):
    """A run whose episodes are made up: of every third scenario the group tells something. It may be killed at a call of `_play`."""

    def __init__(self, folder, *, kill_at=None, failing=(), **grpo):
        settings = {"batches": 3, "groups_per_batch": 4, "steps_per_batch": 4, "group_size": 2, **grpo}
        self.config = RunConfig.from_values(
            {"env": {"id": "x/Y-v0"}, "warm_start": {"steps": 2, "batch_size": 5}, "grpo": settings, "evaluation": {"n": 1}}
        )
        self.folder, self.name, self.agent = folder, "tiny", None
        self.store = EpisodeStore(folder)
        self.live = SimpleNamespace(phase=lambda *_: None, row=lambda _: None, note=lambda _: None)
        self.serving, self.token_budget = SimpleNamespace(asleep=nullcontext), 1000
        self.tokenizer = SimpleNamespace(decode=lambda ids, **_: str(ids))
        self._trainer = SimpleNamespace(take_statistics=BatchStatistics, save=save)
        # In plain order, so that a scenario is known by its place.
        self._practice = SimpleNamespace(take=lambda first, count: [Scenario(str(number), number) for number in range(first, first + count)])
        self.calls, self.kill_at, self.failing = [], kill_at, failing

    def _publish(self, step):
        return SimpleNamespace(version=f"tiny@{step}", difference=0.0, seconds=0.0)

    def _play(self, agent, scenarios, label, *, group_size, detail="", **options):
        if len(self.calls) == self.kill_at:
            raise Killed
        self.calls.append((label, [scenario.seed for scenario in scenarios]))
        return [self.group(scenario) for scenario in scenarios]

    def group(self, scenario):
        failure = Failure("policy", "gone") if scenario.seed in self.failing else None
        reward = float(scenario.seed % 3 == 0)
        turns = [Turn([], say(""), reward=value, prompt_ids=[1], completion_ids=[2], logprobs=[-1.0]) for value in (0.0, reward)]
        episodes = [Episode(f"{scenario.id}/{member}", "x", scenario, member, turns=[turn]) for member, turn in enumerate(turns)]
        episodes[1].failure = failure
        return EpisodeGroup(scenario, episodes)

    def go(self):
        """Train to the end, or to the kill; return the scenarios that each batch was trained on."""
        saved = _standing.found(self.config, self.folder)
        done, trained = saved.step if saved else 0, {}
        try:
            for batch, steps in enumerate(self._batches(done, self._next_scenario(saved)), start=done + 1):
                trained[batch] = sorted({int(row.sequence.episode_id.split("/")[0]) for rows in steps for row in rows})
        except Killed:
            pass
        return trained


def save(folder):
    for names in GRPO_STATE:
        (folder / names[0].replace("*", "")).write_text("x")


def test_without_dynamic_sampling_each_batch_plays_its_number_of_scenarios_after_the_warm_starts(tmp_path):
    run = Run(tmp_path / "run")
    assert run.go() == {1: [12], 2: [15], 3: [18, 21]}
    assert run.calls == [
        ("train-0001", [10, 11, 12, 13]), ("train-0002", [14, 15, 16, 17]), ("train-0003", [18, 19, 20, 21])
    ]  # fmt: skip
    assert [(row["sampling_rounds"], row["surplus_groups"], row["dropped_groups"]) for row in read_metrics(run.folder)] == [
        (1, 0, 3), (1, 0, 3), (1, 0, 2)
    ]  # fmt: skip


def test_with_dynamic_sampling_batches_are_filled_and_the_next_goes_on_after_what_was_played(tmp_path):
    run = Run(tmp_path / "run", dynamic_sampling=True)
    assert run.go() == {1: [12, 15, 18, 21], 2: [24, 27, 30, 33], 3: [36, 39, 42, 45]}
    played = [number for _, numbers in run.calls for number in numbers]
    assert played == list(range(10, 10 + len(played)))
    rows = read_metrics(run.folder)
    assert all(row["sampling_rounds"] > 1 for row in rows)
    # What is trained on, what tells nothing, and what was too much: nothing else was played.
    assert sum(4 + row["dropped_groups"] + row["surplus_groups"] for row in rows) == len(played)
    assert sum(row["episodes"] for row in rows) == 2 * len(played)


@pytest.mark.parametrize("kill_at", range(8))
def test_a_killed_run_trains_on_the_same_scenarios_as_one_that_was_not(tmp_path, kill_at):
    whole = Run(tmp_path / "whole", dynamic_sampling=True).go()
    before = Run(tmp_path / "run", dynamic_sampling=True, kill_at=kill_at).go()
    after = Run(tmp_path / "run", dynamic_sampling=True).go()
    assert before | after == whole


def test_rounds_that_differ_after_a_kill_have_journals_of_their_own(tmp_path):
    # The first attempt's only useful group fails, and doesn't when it is played again: the rounds after it begin elsewhere.
    first = Run(tmp_path / "run", dynamic_sampling=True, failing={12}, kill_at=3)
    first.go()
    again = Run(tmp_path / "run", dynamic_sampling=True)
    again.go()
    begins = {}
    for label, numbers in [*first.calls, *again.calls]:
        assert begins.setdefault(label, numbers[0]) == numbers[0]
