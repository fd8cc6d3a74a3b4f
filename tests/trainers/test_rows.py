"""Rows and micro-batches: what is kept, how it is cut, how it is padded."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from art_gym.episodes import Episode, EpisodeGroup, Failure, Turn
from art_gym.messages import call
from art_gym.rollout import Reply, Runner, TurnState, branch_at
from art_gym.scenarios import Scenario
from art_gym_trainers.rows import Row, batch_rows, split_steps
from art_gym_trainers.sequences import TokenSequence, episode_sequences

pytestmark = pytest.mark.train

SCENARIO = Scenario("s", 0)


def played(member: int, reward: float, *, turns: int = 1, forked: bool = False, failed: bool = False) -> Episode:
    episode = Episode(f"e{member}", "x", SCENARIO, member, failure=Failure("policy", "gone") if failed else None)
    prompt = [1, 2]
    for index in range(turns):
        if forked and index == turns - 1:
            prompt = [9, *prompt[1:]]
        completion = [10 + index]
        episode.turns.append(
            Turn(
                [],
                {"role": "assistant", "content": ""},
                prompt_ids=prompt,
                completion_ids=completion,
                logprobs=[-1.0],
                reward=reward if index == turns - 1 else 0.0,
            )
        )
        prompt = [*prompt, *completion, 3]
    return episode


def test_groups_with_equal_returns_are_dropped_and_counted() -> None:
    useful = EpisodeGroup(SCENARIO, [played(0, 1.0), played(1, 0.0)])
    useless = EpisodeGroup(SCENARIO, [played(2, 0.5), played(3, 0.5)])
    broken = EpisodeGroup(SCENARIO, [played(4, 1.0), played(5, 0.0, failed=True)])
    kept, counts = batch_rows([useful, useless, broken], "group_mean")
    assert [[row.advantages for row in rows] for rows in kept] == [[[0.0, 0.0, 0.5], [0.0, 0.0, -0.5]]]
    assert (counts.groups, counts.dropped_groups, counts.failed_episodes) == (3, 2, 1)
    assert (counts.tokens, counts.sampled_tokens) == (6, 2)


def test_both_parts_of_a_fork_carry_the_episodes_advantage() -> None:
    kept, counts = batch_rows([EpisodeGroup(SCENARIO, [played(0, 1.0, turns=2, forked=True), played(1, 0.0)])], "group_mean")
    assert [(row.sequence.episode_id, max(row.advantages, key=abs)) for row in kept[0]] == [("e0", 0.5), ("e0", 0.5), ("e1", -0.5)]
    assert counts.forks == {"context": 1}


def test_with_credit_by_turn_each_sampled_token_has_its_turns_advantage() -> None:
    # All reward comes at the end, and half of it counts one turn earlier: 0.5, 1 against 0, 0.
    groups = [EpisodeGroup(SCENARIO, [played(0, 1.0, turns=2), played(1, 0.0, turns=2)])]
    kept, _ = batch_rows(groups, "group_mean", credit="turn", discount=0.5)
    # Prompt of two, a sampled token, one of context, a sampled token.
    assert [row.advantages for row in kept[0]] == [[0.0, 0.0, 0.25, 0.0, 0.5], [0.0, 0.0, -0.25, 0.0, -0.5]]


def test_both_parts_of_a_fork_have_the_advantages_of_their_own_turns() -> None:
    groups = [EpisodeGroup(SCENARIO, [played(0, 1.0, turns=2, forked=True), played(1, 0.0, turns=2)])]
    kept, _ = batch_rows(groups, "group_mean", credit="turn", discount=0.5)
    assert [row.advantages for row in kept[0]] == [[0.0, 0.0, 0.25], [0.0, 0.0, 0.0, 0.0, 0.5], [0.0, 0.0, -0.25, 0.0, -0.5]]


def test_forks_and_realigned_turns_are_counted() -> None:
    def decode(token_ids: Sequence[int]) -> str:
        # 9 is another spelling of 1.
        return "".join("1" if token == 9 else chr(64 + token) if token > 1 else "1" for token in token_ids)

    groups = [EpisodeGroup(SCENARIO, [played(0, 1.0, turns=2, forked=True), played(1, 0.0)])]
    _, forked = batch_rows(groups, decode=decode)
    assert (forked.forks, forked.realigned) == ({"boundary": 1}, 0)
    kept, realigned = batch_rows(groups, decode=decode, realign=True)
    assert (realigned.forks, realigned.realigned) == ({}, 1)
    assert [row.sequence.token_ids for row in kept[0]] == [[1, 2, 10, 3, 11], [1, 2, 10]]


def test_steps_are_dealt_evenly_and_never_empty() -> None:
    row = Row.uniform(TokenSequence("e", [1, 2], [False, True], [0.0, -1.0], [-1, 0]), 1.0)
    groups = [[row]] * 3
    assert [len(step) for step in split_steps(groups, 8)] == [1, 1, 1]
    assert [len(step) for step in split_steps(groups, 2)] == [2, 1]
    assert split_steps([], 8) == []


class Halving:
    """Guesses at random, with made-up tokens: each reply's prompt is all that was said before."""

    name = "made-up tokens"

    def __init__(self) -> None:
        self.calls = 0

    async def act(self, state: TurnState) -> Reply:
        self.calls += 1
        said = state.memory.setdefault("said", [1])
        prompt, number = [*said, 100 + state.turn], int(state.rng.integers(1, 1001))
        said[:] = [*prompt, 1000 + self.calls]
        return Reply(call("guess", number=number), prompt_ids=prompt, completion_ids=[1000 + self.calls], logprobs=[-0.5])

    async def close(self) -> None:
        pass


def test_what_branches_share_is_sampled_once_and_trained_once() -> None:
    agent = Halving()
    runner = Runner("art_gym/GuessNumber-v0", agent, env_kwargs={"high": 1000, "max_turns": 5}, group_size=3, branch=branch_at({2: 2, 3: 1}))
    groups = runner.collect([Scenario(f"s{seed}", seed) for seed in range(4)])
    for group in groups:
        sequences = [sequence for episode in group.episodes for sequence in episode_sequences(episode)]
        assert len(sequences) == len(group.episodes) > 3
        assert all(sequence.fork is None for sequence in sequences)
    trained = [
        token
        for group in groups
        for episode in group.episodes
        for sequence in episode_sequences(episode)
        for token, sampled in zip(sequence.token_ids, sequence.sampled, strict=True)
        if sampled
    ]
    assert sorted(trained) == list(range(1001, 1001 + agent.calls))
