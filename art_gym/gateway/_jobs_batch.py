"""What a job trains on: the episodes of a request, looked up, checked and written into one file before anything starts."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from art_gym.episodes import Episode, Failure, Turn
from art_gym.errors import UsageError
from art_gym.gateway._errors import ApiError
from art_gym.gateway.calls import Call, episode_of
from art_gym.gateway.store import UnknownEpisode
from art_gym.gateway.train_schemas import Batch, InlineEpisode, TrainConfig, TrainRequest
from art_gym.scenarios import Scenario

if TYPE_CHECKING:
    from art_gym.gateway.store import SessionStore


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the policy can be trained on.

    Attributes:
        vocabulary: How many tokens it knows; None if unknown.
        longest: Most tokens of one prompt and its answer; None if unknown.
        temperature: What the gateway samples captured calls at; None where clients decide.
        check: Looks whether the options of a job, its temperature and its number of groups fit together; raises `UsageError`.
    """

    vocabulary: int | None = None
    longest: int | None = None
    temperature: float | None = None
    check: Callable[[Mapping[str, Any], float, int], object] | None = None


async def write_batch(request: TrainRequest, store: SessionStore, path: Path | None, bounds: Bounds) -> Batch:
    """Check everything that a request names, and write it.

    Args:
        request: What was asked for.
        store: Holds the episodes.
        path: The file, a line a group; None to write none.
        bounds: Of what can be trained on.

    Raises:
        ApiError: The request can't be trained on; one line says what of it and the way out.
    """
    _check_repeats(request)
    tally = _Tally(request.config, bounds)
    file = None if path is None else await asyncio.to_thread(_opened, path)
    try:
        for number, members in enumerate(request.groups):
            episodes = []
            for place, member in enumerate(members):
                where = f"groups[{number}][{place}]"
                episode, temperatures = await _captured(store, member, where) if isinstance(member, str) else _inline(member, where)
                tally.add(episode, temperatures, where)
                episodes.append(episode)
            if file is not None:
                await asyncio.to_thread(_write, file, f"groups[{number}]", episodes)
            del episodes
        batch = tally.batch(len(request.groups))
        if bounds.check is not None:
            _check_config(bounds.check, request.config, batch)
        return batch
    except BaseException:
        if path is not None:
            await asyncio.to_thread(path.unlink, missing_ok=True)
        raise
    finally:
        if file is not None:
            file.close()


def read_batch(path: Path) -> Iterator[tuple[str, list[Episode]]]:
    """Read what `write_batch` wrote: each group's name and its episodes."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            data = json.loads(line)
            yield data["group"], [Episode.from_dict(episode) for episode in data["episodes"]]


def _check_config(check: Callable[[Mapping[str, Any], float, int], object], config: TrainConfig, batch: Batch) -> None:
    try:
        check(config.model_dump(exclude_none=True), batch.temperature, batch.groups)
    except UsageError as error:
        raise ApiError(422, str(error), param="config") from None


def _refused(where: str, message: str) -> ApiError:
    return ApiError(422, f"{where}: {message}", param=where)


def _check_repeats(request: TrainRequest) -> None:
    seen: dict[str, str] = {}
    for number, members in enumerate(request.groups):
        if len(members) < 2:
            raise _refused(
                f"groups[{number}]",
                "a group of one episode has nothing to be compared with; give at least two attempts at the same thing, or leave the group out",
            )
        for place, member in enumerate(members):
            where = f"groups[{number}][{place}]"
            name = member if isinstance(member, str) else member.id or where
            if name in seen:
                raise _refused(where, f"episode {name:.200} is in {seen[name]} already; give each episode once")
            seen[name] = where


async def _captured(store: SessionStore, id: str, where: str) -> tuple[Episode, set[float]]:
    try:
        record = await store.get(id)
    except UnknownEpisode:
        raise _refused(where, f"there is no episode {id:.200}; it was deleted, or never created here") from None
    if record.state == "open":
        raise _refused(where, f"episode {id} is still open; finish it first (POST /episodes/{id}/finish)")
    if record.state in ("failed", "expired"):
        return episode_of(record, []), set()
    if record.reward is None and not record.rewards:
        raise _refused(where, f"episode {id} has no reward yet; give it one first (POST /episodes/{id}/rewards)")
    calls = [call for call in await store.calls(id) if not _came_to_nothing(call)]
    episode = episode_of(record, calls)
    for turn in episode.turns:
        # Only the tokens are trained on.
        turn.observation = []
    return episode, {call.temperature for call in calls}


def _came_to_nothing(call: Call) -> bool:
    """Whether its client left before anything was sampled: there is nothing to train on, and nothing that the policy decided."""
    return call.abandoned and not call.completion_ids


def _inline(given: InlineEpisode, where: str) -> tuple[Episode, set[float]]:
    name = given.id or where
    scenario = Scenario(id=where, seed=0, options={})
    if given.failure is not None:
        return Episode(id=name, env_id="inline", scenario=scenario, failure=Failure("environment", "failed before it was sent")), set()
    turns = [
        Turn(
            observation=[],
            action={"role": "assistant", "content": None},
            reward=turn.reward,
            policy=turn.policy,
            prompt_ids=turn.prompt_ids,
            completion_ids=turn.completion_ids,
            logprobs=None if turn.logprobs is None else [float(value) for value in turn.logprobs],
        )
        for turn in given.turns
    ]
    if turns and given.reward is not None and not any(turn.reward for turn in turns):
        turns[-1].reward = given.reward
    episode = Episode(id=name, env_id="inline", scenario=scenario, turns=turns, terminated=True, shared_turns=given.shared_turns)
    return episode, {turn.temperature for turn in given.turns}


@dataclass(slots=True)
class _Tally:
    """Checks episodes as they come, and counts what is in them."""

    config: TrainConfig
    bounds: Bounds
    episodes: int = 0
    failed: int = 0
    turns: int = 0
    sampled: int = 0
    policies: Counter[str] = field(default_factory=Counter)
    temperature: float | None = None
    _first: str = ""

    def add(self, episode: Episode, temperatures: set[float], where: str) -> None:
        self.episodes += 1
        if episode.failure is not None:
            self.failed += 1
            return
        if not episode.turns:
            raise _refused(where, f"episode {episode.id} has no call of the policy; its agent must use the episode's base_url")
        for index, turn in enumerate(episode.turns):
            self._check(episode, index, turn, where)
            self.turns += 1
            self.sampled += len(turn.completion_ids or ()) if index >= episode.shared_turns else 0
            self.policies[turn.policy or "unknown"] += 1
        for temperature in sorted(temperatures):
            self._check_temperature(temperature, episode, where)

    def _check(self, episode: Episode, index: int, turn: Turn, where: str) -> None:
        what = f"turn {index} of episode {episode.id}"
        if not turn.trainable:
            missing = "token ids" if turn.prompt_ids is None or turn.completion_ids is None else "a log-probability for each sampled token"
            raise _refused(
                where,
                f"{what} lacks {missing}, so that it can't be trained on; they are recorded where vLLM answers return_token_ids and logprobs, "
                "with the episode's own sampling",
            )
        prompt, completion = turn.prompt_ids or [], turn.completion_ids or []
        if not prompt:
            raise _refused(where, f"{what} has an empty prompt; the first token needs one before it")
        highest = max(itertools.chain(prompt, completion))
        if self.bounds.vocabulary is not None and highest >= self.bounds.vocabulary:
            raise _refused(where, f"{what} has the token id {highest}, and the policy knows {self.bounds.vocabulary}; it is another model's")
        total = len(prompt) + len(completion)
        if self.bounds.longest is not None and total > self.bounds.longest:
            raise _refused(where, f"{what} has {total} tokens, and the policy takes at most {self.bounds.longest}")

    def _check_temperature(self, temperature: float, episode: Episode, where: str) -> None:
        if temperature <= 0:
            raise _refused(
                where, f"episode {episode.id} was sampled at temperature {temperature:g}, without any chance to learn from; sample at 1"
            )
        wanted = self.config.temperature
        if wanted is not None and temperature != wanted:
            raise _refused(
                where, f"episode {episode.id} was sampled at temperature {temperature:g}, not at config.temperature={wanted:g}; leave that out"
            )
        if self.temperature is None:
            self.temperature, self._first = temperature, episode.id
        elif temperature != self.temperature:
            raise _refused(
                where,
                f"episode {episode.id} was sampled at temperature {temperature:g} and episode {self._first} at {self.temperature:g}; "
                "train on episodes of one temperature at a time",
            )

    def batch(self, groups: int) -> Batch:
        temperature = next(value for value in (self.temperature, self.config.temperature, self.bounds.temperature, 1.0) if value is not None)
        return Batch(
            groups=groups,
            episodes=self.episodes,
            failed_episodes=self.failed,
            turns=self.turns,
            sampled_tokens=self.sampled,
            temperature=temperature,
            policies=dict(sorted(self.policies.items())),
        )


def _opened(path: Path) -> IO[str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("w", encoding="utf-8")


def _write(file: IO[str], group: str, episodes: list[Episode]) -> None:
    data: dict[str, Any] = {"group": group, "episodes": [episode.to_dict() for episode in episodes]}
    file.write(json.dumps(data) + "\n")
