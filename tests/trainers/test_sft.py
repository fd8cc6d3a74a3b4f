"""The warm start: what is learned from a scripted episode, and that it is learned."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from art_gym.episodes import Episode, Failure  # noqa: E402
from art_gym.errors import UsageError  # noqa: E402
from art_gym.registration import make  # noqa: E402
from art_gym.rollout import Runner  # noqa: E402
from art_gym.scenarios import Scenario  # noqa: E402
from art_gym.wrappers import Transcript  # noqa: E402
from art_gym_agents import ScriptedAgent  # noqa: E402
from art_gym_agents.warmstart import script_for  # noqa: E402
from art_gym_trainers.policy import load_policy, load_tokenizer  # noqa: E402
from art_gym_trainers.sft import episode_examples, warm_start  # noqa: E402

pytestmark = pytest.mark.train


def scripted_episodes(count: int) -> list[Episode]:
    env_id = "art_gym/GuessNumber-v0"
    runner = Runner(env_id, ScriptedAgent(script_for(env_id), name="script"))
    return [group.episodes[0] for group in runner.collect([Scenario(f"s{seed}", seed) for seed in range(count)])]


def test_only_what_the_assistant_says_is_learned_and_its_end_token_with_it(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    (episode,) = scripted_episodes(1)
    (example,) = episode_examples([episode], tokenizer)
    learned = tokenizer.decode([label for label in example["labels"] if label != -100])
    assert len(example["labels"]) == len(example["input_ids"])
    guesses = [turn.action["tool_calls"][0]["function"]["arguments"] for turn in episode.turns]
    assert learned == "".join(f'<tool_call>\n{{"name": "guess", "arguments": {arguments}}}\n</tool_call><|im_end|>' for arguments in guesses)


def test_an_episode_that_shows_the_whole_transcript_is_learned_as_any_other(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    env_id = "art_gym/GuessNumber-v0"
    agent = ScriptedAgent(script_for(env_id), name="script")
    starts = [Scenario(f"s{seed}", seed) for seed in range(3)]
    wrapped = [group.episodes[0] for group in Runner(lambda: Transcript(make(env_id)), agent).collect(starts)]
    assert episode_examples(wrapped, tokenizer) == episode_examples(scripted_episodes(3), tokenizer)


def test_the_loss_falls_on_the_scripts_own_episodes(tiny_model: Path, tmp_path: Path) -> None:
    policy = load_policy(tiny_model, dtype="float32", lora_rank=8, lora_alpha=16)
    losses: list[float] = []
    last = warm_start(
        policy,
        load_tokenizer(tiny_model),
        scripted_episodes(16),
        output_dir=tmp_path,
        learning_rate=2e-2,
        batch_size=2,
        on_step=lambda step, steps, loss: losses.append(loss),
    )
    assert len(losses) == 8
    assert last < losses[0]


def test_the_first_loss_is_the_mean_over_what_the_assistant_says(tiny_model: Path, tmp_path: Path) -> None:
    policy = load_policy(tiny_model, dtype="float32")
    tokenizer = load_tokenizer(tiny_model)
    episodes = scripted_episodes(2)
    terms = []
    for example in episode_examples(episodes, tokenizer):
        with torch.no_grad():
            scores = torch.log_softmax(policy(input_ids=torch.tensor([example["input_ids"]])).logits[0], -1)
        terms += [-scores[place - 1, label].item() for place, label in enumerate(example["labels"]) if label != -100]
    losses: list[float] = []
    warm_start(policy, tokenizer, episodes, output_dir=tmp_path, batch_size=2, on_step=lambda step, steps, loss: losses.append(loss))
    assert losses == [pytest.approx(sum(terms) / len(terms), abs=1e-4)]


def test_a_step_is_the_same_however_the_token_budget_cuts_it(tiny_model: Path, tmp_path: Path) -> None:
    tokenizer, episodes = load_tokenizer(tiny_model), scripted_episodes(6)
    lengths = [len(example["input_ids"]) for example in episode_examples(episodes, tokenizer)]
    assert len(set(lengths)) > 1  # else nothing is padded

    def trained(token_budget: int | None) -> tuple[list[float], torch.Tensor]:
        torch.manual_seed(0)
        policy = load_policy(tiny_model, dtype="float32", lora_rank=4, lora_alpha=8)
        losses: list[float] = []
        options = {"output_dir": tmp_path, "batch_size": 3, "token_budget": token_budget}
        warm_start(policy, tokenizer, episodes, **options, on_step=lambda step, steps, loss: losses.append(loss))
        return losses, torch.cat([parameter.detach().flatten() for parameter in policy.parameters() if parameter.requires_grad])

    losses, weights = trained(None)
    assert len(losses) == 2
    for token_budget in (1, 2 * max(lengths)):
        other_losses, other_weights = trained(token_budget)
        assert other_losses == pytest.approx(losses, abs=1e-5)
        torch.testing.assert_close(other_weights, weights, rtol=0, atol=1e-5)


def test_nothing_to_learn_from_is_an_error_before_training(tiny_model: Path, tmp_path: Path) -> None:
    failed = Episode("e", "x", Scenario("s", 0), failure=Failure("environment", "boom"))
    with pytest.raises(UsageError, match="no scripted episode finished"):
        warm_start(load_policy(tiny_model), load_tokenizer(tiny_model), [failed], output_dir=tmp_path)


def test_a_template_that_marks_nothing_is_an_error(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with pytest.raises(UsageError, match=r"wrap the assistant's part of the template in \{% generation %\}"):
        episode_examples(scripted_episodes(1), tokenizer)
