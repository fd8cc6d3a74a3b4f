"""Episodes against a real vLLM: what is recorded is what the engine saw and sampled."""

from collections.abc import Iterator

import pytest

from art_gym import EpisodeGroup, Runner, make
from art_gym.engine import Engine, EngineConfig
from art_gym.rollout import TurnState
from art_gym_agents import ChatAgent
from art_gym_trainers.sequences import episode_sequences

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

GROUPS, MEMBERS, TURNS, MAX_TOKENS, CONTEXT = 3, 2, 4, 24, 512


@pytest.fixture(scope="module")
def engine(tiny_model) -> Iterator[Engine]:
    config = EngineConfig(model=str(tiny_model), dtype="float32", max_model_len=CONTEXT, kv_cache_gib=0.25, max_num_seqs=8)
    with Engine(config) as engine:
        yield engine


def agent_for(engine: Engine, **options) -> ChatAgent:
    return ChatAgent(engine.base_url, engine.model, max_tokens=MAX_TOKENS, version="tiny@7", **options)


@pytest.fixture(scope="module")
def groups(engine: Engine) -> list[EpisodeGroup]:
    options = {"max_turns": TURNS}
    runner = Runner("art_gym/GuessNumber-v0", agent_for(engine), env_kwargs=options, group_size=MEMBERS, engine_check=engine.check)
    return runner.collect(make("art_gym/GuessNumber-v0", **options).unwrapped.scenarios("train", GROUPS))


def test_every_episode_finishes_in_its_place(groups: list[EpisodeGroup]):
    assert [group.scenario.id for group in groups] == ["train-0", "train-1", "train-2"]
    assert [[episode.member for episode in group.finished] for group in groups] == [[0, 1]] * GROUPS


def test_every_turn_has_one_logprob_for_each_sampled_token(groups: list[EpisodeGroup]):
    turns = [turn for group in groups for episode in group.episodes for turn in episode.turns]
    assert len(turns) >= GROUPS * MEMBERS
    for turn in turns:
        assert turn.trainable
        assert len(turn.completion_ids) <= MAX_TOKENS
        assert (len(turn.completion_ids) == MAX_TOKENS) >= (turn.finish_reason == "length")
        assert all(logprob <= 0 for logprob in turn.logprobs)


def test_every_turn_knows_its_policy_version(groups: list[EpisodeGroup]):
    assert {turn.policy for group in groups for episode in group.episodes for turn in episode.turns} == {"tiny@7"}


def test_a_prompt_extends_the_tokens_before_it_or_is_counted_as_a_fork(groups: list[EpisodeGroup]):
    for episode in (episode for group in groups for episode in group.episodes):
        forks = 0
        so_far: list[int] = []
        for turn in episode.turns:
            forks += turn.prompt_ids[: len(so_far)] != so_far
            so_far = turn.prompt_ids + turn.completion_ids
        assert len(episode_sequences(episode)) == 1 + forks


def test_members_of_a_group_start_from_the_same_tokens(groups: list[EpisodeGroup]):
    for group in groups:
        first, second = (episode.turns[0].prompt_ids for episode in group.episodes)
        assert first == second


def test_the_logprobs_are_those_of_the_tokens(engine: Engine, groups: list[EpisodeGroup]):
    turn = groups[0].episodes[0].turns[0]
    scored = engine.prompt_logprobs(turn.prompt_ids + turn.completion_ids)[len(turn.prompt_ids) - 1 :]
    assert turn.logprobs == pytest.approx(scored, abs=2e-3)


def test_a_seeded_agent_samples_the_same_again(engine: Engine):
    def play() -> list[list[int] | None]:
        runner = Runner(
            "art_gym/GuessNumber-v0", agent_for(engine, seeded=True), env_kwargs={"max_turns": 1}, group_size=MEMBERS, concurrency=1
        )
        (group,) = runner.collect(make("art_gym/GuessNumber-v0").unwrapped.scenarios("train", 1))
        return [episode.turns[0].completion_ids for episode in group.episodes]

    first = play()
    assert first == play()
    assert first[0] != first[1]


def test_a_conversation_too_long_for_the_context_is_truncated(engine: Engine):
    class Wordy(ChatAgent):
        """Sends a long history: the environment's own would take many turns to fill the context."""

        async def act(self, state: TurnState):
            state.messages[1] = {"role": "user", "content": "word " * 2 * CONTEXT}
            return await super().act(state)

    agent = Wordy(engine.base_url, engine.model, max_tokens=MAX_TOKENS)
    (group,) = Runner("art_gym/GuessNumber-v0", agent).collect(make("art_gym/GuessNumber-v0").unwrapped.scenarios("train", 1))
    (episode,) = group.finished
    assert (episode.truncation, episode.turns) == ("context_length", [])
