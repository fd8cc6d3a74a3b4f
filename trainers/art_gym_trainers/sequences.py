"""Token sequences: an episode's recorded tokens, laid end to end for training.

Nothing here renders a message or tokenises a text. A turn whose prompt extends a sequence of its episode is appended to it: the tokens between
are context (tool results, the template's own marks) and are masked out; the sampled tokens are trained on. A turn whose prompt extends none
starts a new sequence: a fork, counted with its cause (`art_gym_trainers.forks`). So conversations that an agent holds side by side, or goes
back in, become the sequences of a tree, and each sampled token is trained on once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from art_gym.episodes import Episode, Turn
from art_gym.errors import MissingTokens
from art_gym_trainers.forks import Decode, ForkCause, aligned_end, fork_cause
from art_gym_trainers.trees import common_prefix


@dataclass(slots=True)
class TokenSequence:
    """A run of tokens with a mask of those that the policy sampled; all lists are equally long.

    Attributes:
        episode_id: The episode that it comes from.
        token_ids: Context and sampled tokens, in order.
        sampled: Whether the policy sampled the token in this episode; only these are trained on. What a branch shares with its parent was
            sampled there, and is context here.
        logprobs: Log-probability of each sampled token when it was sampled; 0.0 on context.
        turns: Index of the turn that sampled the token, the parent's turns too; -1 on what no turn sampled.
        fork: Why the sequence was started in mid-episode; None for an episode's first.
        realigned: How many turns of the episode's own were appended although their prompts spelled the context before them in other tokens.
        first_turn: Index of the turn that it began with.
    """

    episode_id: str
    token_ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    fork: ForkCause | None = None
    realigned: int = 0
    first_turn: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first sampled one."""
        return self.sampled.index(True) if True in self.sampled else len(self)

    def _append(self, index: int, context: list[int], completion_ids: list[int], logprobs: list[float] | None) -> None:
        """Append a turn; without log-probabilities it is the parent's."""
        self.token_ids += [*context, *completion_ids]
        self.sampled += [False] * len(context) + [logprobs is not None] * len(completion_ids)
        self.logprobs += [0.0] * len(context) + (logprobs or [0.0] * len(completion_ids))
        self.turns += [-1] * len(context) + [index] * len(completion_ids)


def episode_sequences(episode: Episode, *, decode: Decode | None = None, realign: bool = False) -> list[TokenSequence]:
    """Lay an episode's recorded tokens out as sequences: one, unless it forked. A branch's begin with its parent's tokens, as context.

    Args:
        episode: What was played.
        decode: The tokens' text, by which the causes of forks are told apart (`art_gym_trainers.forks.token_decoder`); without it a fork's
            cause is only where it happened.
        realign: Go on with the recorded sequence where a prompt has the same text, with every sampled token as it was, and only tokens of the
            context are others (an artefact of tokenising a longer text). The tokens after it were then sampled after a slightly other prompt
            than the one they are trained on, which the importance ratio sees; a fork would compute the whole context once more. Needs `decode`.

    Raises:
        MissingTokens: A turn has no token ids or logprobs.
        ValueError: `realign` without `decode`.
    """
    if realign and decode is None:
        raise ValueError("realign compares texts: give decode too, such as token_decoder(tokenizer)")
    sequences: list[TokenSequence] = []
    for index, turn in enumerate(episode.turns):
        prompt_ids, completion_ids, recorded = _recorded(episode, index, turn)
        logprobs = recorded if index >= episode.shared_turns else None
        cause = None
        if (extended := _extended(sequences, prompt_ids)) is not None:
            extended._append(index, prompt_ids[len(extended) :], completion_ids, logprobs)
            continue
        if sequences:
            nearest = _nearest(sequences, prompt_ids)
            end = aligned_end(nearest.token_ids, nearest.turns, prompt_ids, decode) if realign and decode else None
            if end is not None:
                nearest._append(index, prompt_ids[end:], completion_ids, logprobs)
                nearest.realigned += index >= episode.shared_turns
                continue
            cause = fork_cause(nearest.token_ids, nearest.turns, prompt_ids, tools=episode.tools, decode=decode)
        started = TokenSequence(episode.id, fork=cause, first_turn=index)
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


def _extended(sequences: list[TokenSequence], prompt_ids: list[int]) -> TokenSequence | None:
    """The longest sequence that the prompt extends; of several the latest, since an agent goes on from the answer that came last."""
    found = [one for one in reversed(sequences) if prompt_ids[: len(one)] == one.token_ids]
    return max(found, key=len, default=None)


def _nearest(sequences: list[TokenSequence], prompt_ids: list[int]) -> TokenSequence:
    """The sequence, the latest of several, that has most of the prompt's beginning."""
    return max(reversed(sequences), key=lambda one: common_prefix(one.token_ids, prompt_ids))


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
