"""Token sequences: an episode's recorded tokens, laid end to end for training.

Nothing here renders a message or calls a tokenizer. A turn whose prompt extends the sequence so far is appended to it: the tokens between are
context (tool results, the template's own marks) and are masked out; the sampled tokens are trained on. A turn whose prompt doesn't extend it
starts a new sequence: a fork, counted with its cause.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from art_gym.episodes import Episode, Turn
from art_gym.errors import MissingTokens

ForkCause = Literal["sampled_tokens", "context"]
"""Where a prompt leaves the sequence so far: among tokens that the policy sampled (they were rendered back differently: another spelling of a
tool call, merges across a boundary, reasoning taken out), or in the context before them (the history was rewritten)."""


@dataclass(slots=True)
class TokenSequence:
    """A run of tokens with a mask of those that the policy sampled; all lists are equally long.

    Attributes:
        episode_id: The episode that it comes from.
        token_ids: Context and sampled tokens, in order.
        sampled: Whether the policy sampled the token; only these are trained on.
        logprobs: Log-probability of each sampled token when it was sampled; 0.0 on context.
        turns: Index of the turn that sampled the token; -1 on context.
        fork: Why the sequence was started in mid-episode; None for an episode's first.
    """

    episode_id: str
    token_ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    fork: ForkCause | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first sampled one."""
        return self.sampled.index(True) if True in self.sampled else len(self)

    def _append(self, index: int, context: list[int], completion_ids: list[int], logprobs: list[float]) -> None:
        self.token_ids += [*context, *completion_ids]
        self.sampled += [False] * len(context) + [True] * len(completion_ids)
        self.logprobs += [0.0] * len(context) + logprobs
        self.turns += [-1] * len(context) + [index] * len(completion_ids)


def episode_sequences(episode: Episode) -> list[TokenSequence]:
    """Lay an episode's recorded tokens out as sequences: one, unless it forked.

    Raises:
        MissingTokens: A turn has no token ids or logprobs.
    """
    sequences: list[TokenSequence] = []
    for index, turn in enumerate(episode.turns):
        prompt_ids, completion_ids, logprobs = _recorded(episode, index, turn)
        current = sequences[-1] if sequences else None
        if current is not None and prompt_ids[: len(current)] == current.token_ids:
            current._append(index, prompt_ids[len(current) :], completion_ids, logprobs)
            continue
        started = TokenSequence(episode.id, fork=None if current is None else _fork_cause(current, prompt_ids))
        started._append(index, prompt_ids, completion_ids, logprobs)
        sequences.append(started)
    return sequences


def require_tokens(episodes: Iterable[Episode]) -> None:
    """Check that every turn can be trained on, before anything is spent on it.

    Raises:
        MissingTokens: Names the first turn without token ids or logprobs, and the server settings that give them.
    """
    for episode in episodes:
        for index, turn in enumerate(episode.turns):
            _recorded(episode, index, turn)


def _recorded(episode: Episode, index: int, turn: Turn) -> tuple[list[int], list[int], list[float]]:
    if turn.prompt_ids is None or turn.completion_ids is None or turn.logprobs is None:
        missing = "token ids" if turn.prompt_ids is None or turn.completion_ids is None else "log-probabilities"
        raise MissingTokens(
            f"turn {index} of episode {episode.id} (policy {turn.policy or 'unknown'!r}) has no {missing}, so it can be evaluated but not "
            "trained on; use a vLLM server that answers 'return_token_ids' and 'logprobs', started with '--logprobs-mode processed_logprobs'"
        )
    if len(turn.logprobs) != len(turn.completion_ids):
        raise MissingTokens(
            f"turn {index} of episode {episode.id} has {len(turn.completion_ids)} sampled tokens but {len(turn.logprobs)} log-probabilities; "
            "ask the server for one log-probability a token ('logprobs': true)"
        )
    return turn.prompt_ids, turn.completion_ids, turn.logprobs


def _fork_cause(current: TokenSequence, prompt_ids: list[int]) -> ForkCause:
    differs = next(
        (position for position, (old, new) in enumerate(zip(current.token_ids, prompt_ids, strict=False)) if old != new), len(prompt_ids)
    )
    return "sampled_tokens" if current.sampled[differs] else "context"
