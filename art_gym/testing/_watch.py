"""What must hold of every single reset and step: an environment watched from outside, call by call."""

from __future__ import annotations

import json
import math
import numbers
import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from hypothesis.errors import HypothesisException

from art_gym._actions import message_of, printable, read_action
from art_gym._transcripts import new_messages
from art_gym.testing._arguments import checked_score
from art_gym.testing._layers import Layers
from art_gym.testing._outcomes import RESET_FIELDS, STEP_FIELDS, Outcome, Walk, brief, copied, do_reset, do_reset_unseeded, do_step, frozen


@dataclass(frozen=True, slots=True)
class Transition:
    """One step, as it is shown to an author's invariants and target. Not to be changed.

    Attributes:
        env: The environment, as it was made: with its wrappers.
        action: The action, as it was sent.
        observation: What `step` returned: the new messages, or under the wrapper `Transcript` all of the episode.
        reward: This step's reward.
        terminated: Whether the task ended the episode.
        truncated: Whether a limit ended it.
        info: The step's info.
        turn: The step's number in its episode, from 1.
    """

    env: gymnasium.Env[Any, Any]
    action: Any
    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    turn: int


Invariant = Callable[[Transition], None]
"""Takes a transition; raises AssertionError, with a text, where something about it is wrong."""

Target = Callable[[Transition], float]
"""Takes a transition; returns a finite number that Hypothesis tries to make larger."""

_LARGEST = 2**63
"""Gymnasium's vector environments put the whole numbers of an info into an array of 64 bits each."""


def name_of(invariant: Invariant) -> str:
    """The name under which a breach of an author's own invariant is reported."""
    return str(getattr(invariant, "__name__", type(invariant).__name__))


class Broken(Exception):
    """An invariant doesn't hold.

    Attributes:
        invariant: Its short name.
        problem: What was seen.
        where: What tells this from other breaches of the same invariant: the place of an exception.
    """

    def __init__(self, invariant: str, problem: str, where: str = "") -> None:
        super().__init__(f"{invariant}: {problem}")
        self.invariant = invariant
        self.problem = problem
        self.where = where

    @property
    def key(self) -> tuple[str, str]:
        return self.invariant, self.where


class Watch:
    """An environment that is reset and stepped under watch; raises `Broken` as soon as something doesn't hold.

    Attributes:
        transitions: The steps since the last reset with a seed.
        outcomes: What these, and the resets among them, gave.
        types: Type of every entry of the infos, by its path.
        score: The largest that the target returned; None before it was called.
    """

    def __init__(
        self, env: gymnasium.Env[Any, Any], layers: Layers, invariants: Sequence[Invariant] = (), target: Target | None = None
    ) -> None:
        self.transitions: list[Transition] = []
        self.outcomes: list[Outcome] = []
        self.types: dict[str, str] = {}
        self.score: float | None = None
        self._env = env
        self._layers = layers
        self._invariants = invariants
        self._target = target
        self._returned: list[tuple[str, Any, str]] = []
        self._owners: dict[int, str] = {}
        self._last: Any = None
        self._turn = 0

    def reset(self, walk: Walk, *, unseeded: bool = False) -> Outcome:
        """Reset to the walk's start, or without a seed, and check what comes back."""
        where = f"the reset after step {len(self.transitions)}" if unseeded else "reset"
        with untouched_generators(where):
            outcome = (do_reset_unseeded if unseeded else do_reset)(self._env, walk, self._layers.ignored)
        refuse_exception(outcome, where if unseeded else f"reset(seed={walk.seed})")
        if len(outcome.values) != len(RESET_FIELDS):
            raise Broken("reset", f"{where} returned {len(outcome.values)} values, not ({', '.join(RESET_FIELDS)})")
        if not unseeded:
            self.outcomes, self.transitions = [], []
        self._turn = 0
        self.outcomes.append(outcome)
        observation, info = outcome.values
        self._check_info(where, info)
        self._check_observation(where, observation)
        if self._layers.checks("answers"):
            check_answers(where, observation, [])
        self._last = copied(observation)
        return outcome

    def step(self, action: Any, *, broken: bool = False) -> Outcome:
        """Take a step with a copy of the action, and check what comes back; `broken` says that the action isn't one of the space."""
        self._turn += 1
        where = f"step {len(self.transitions) + 1}"
        sent = copied(action)
        before = frozen(sent)
        with untouched_generators(where):
            outcome = do_step(self._env, sent, self._layers.ignored)
        refuse_exception(outcome, f"{where}, with {'a broken' if broken else 'a well-formed'} action,")
        if len(outcome.values) != len(STEP_FIELDS):
            raise Broken("step", f"{where} returned {len(outcome.values)} values, not ({', '.join(STEP_FIELDS)})")
        if (after := frozen(sent)) != before:
            raise Broken("action mutated", f"{where} changed the action it was given, from {brief(before)} to {brief(after)}")
        self.outcomes.append(outcome)
        observation, reward, terminated, truncated, info = outcome.values
        self._own("the action", where, sent)
        self._check_info(where, info)
        self._check_observation(where, observation)
        self._check_flags(where, terminated, truncated)
        self._check_reward(where, reward, info)
        if self._layers.checks("answers"):
            check_answers(where, new_messages(observation, self._last, action), written_ids(action))
        self._last = copied(observation)
        transition = Transition(self._env, action, observation, float(reward), terminated, truncated, info, self._turn)
        self.transitions.append(transition)
        self._check_invariants(where, transition)
        if self._target is not None:
            # Now, as the invariants: the transition shows the environment itself, which goes on and is closed.
            score = checked_score(self._target, transition)
            self.score = score if self.score is None else max(self.score, score)
        return outcome

    def check_returned(self) -> None:
        """Check that nothing that was returned has been changed since."""
        for where, value, text in self._returned:
            if (now := frozen(value)) != text:
                what = where.partition(" of ")[0].removeprefix("the ")
                raise Broken(f"{what} mutated", f"{where} was changed after it was returned, from {brief(text)} to {brief(now)}")

    def _own(self, what: str, where: str, value: Any) -> None:
        # The list holds on to the value, too: its identity can't be given to something else.
        self._returned.append((f"{what} of {where}", value, frozen(value)))
        for part, owned in _containers(what, value):
            self._owners.setdefault(id(owned), f"{part} of {where}")

    def _check_observation(self, where: str, observation: Any) -> None:
        if not self._env.observation_space.contains(observation):
            raise Broken("observation space", f"the observation of {where} isn't in the observation space: {brief(observation)}")
        for part, owned in _containers("the observation", observation):
            owner = self._owners.get(id(owned))
            if owner is not None:
                raise Broken("observation aliased", f"{part} of {where} is the same object as {owner}: {brief(owned)}; return a copy")
        self._own("the observation", where, observation)

    def _check_flags(self, where: str, terminated: Any, truncated: Any) -> None:
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if type(flag) is not bool:
                raise Broken("flags", f"{name} of {where} is {brief(flag)}, of type {type(flag).__name__}, not a bool")
        if terminated and truncated and self._layers.checks("flags: never both"):
            raise Broken("flags", f"{where} is both terminated and truncated: an episode that the task has ended isn't cut short")

    def _check_reward(self, where: str, reward: Any, info: Any) -> None:
        if isinstance(reward, bool | np.bool_) or not isinstance(reward, numbers.Real):
            raise Broken("reward", f"the reward of {where} is {brief(reward)}, of type {type(reward).__name__}, not a real number")
        value = float(reward)
        if not math.isfinite(value):
            raise Broken("reward", f"the reward of {where} is {reward}, not a finite number")
        low, high = self._layers.reward_range
        if self._layers.checks("reward range") and not low <= value <= high:
            raise Broken("reward range", f"the reward of {where} is {reward}, outside of reward_range, which is from {low} to {high}")
        components = info.get("rewards")
        if not self._layers.checks("reward components") or not isinstance(components, dict):
            return
        if not all(isinstance(value, numbers.Real) for value in components.values()):
            raise Broken("reward components", f'info["rewards"] of {where} holds what is no number: {brief(components)}')
        total = math.fsum(components.values())
        if not math.isclose(total, value, rel_tol=1e-9, abs_tol=1e-9):
            raise Broken("reward components", f'info["rewards"] of {where} adds up to {total}, and the reward is {reward}: {brief(components)}')

    def _check_info(self, where: str, info: Any) -> None:
        if not isinstance(info, dict):
            raise Broken("info", f"the info of {where} is {brief(info)}, of type {type(info).__name__}, not a dictionary")
        shown = {key: value for key, value in info.items() if key != self._layers.ignored}
        try:
            json.dumps(shown, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise Broken("info", f"the info of {where} can't be written as JSON ({error}): {brief(shown)}") from None
        for path, value in _parts("info", shown):
            if value is None:
                raise Broken("info", f"{path} of {where} is None: leave it out, or give it a value of its type, as an empty text")
            if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
                raise Broken("info", f"{path} of {where} is {brief(value)}, a whole number of more than 64 bits: give it as text")
        for path, value in _entries("info", shown):
            kind = type(value).__name__
            if (first := self.types.setdefault(path, kind)) != kind:
                raise Broken("info types", f"{path} of {where} is {brief(value)}, of type {kind}, and before it was of type {first}")
        self._own("the info", where, info)

    def _check_invariants(self, where: str, transition: Transition) -> None:
        for invariant in self._invariants:
            name = name_of(invariant)
            try:
                invariant(transition)
            except HypothesisException:
                raise
            except AssertionError as error:
                raise Broken(name, f"{where}: {error}" if str(error) else f"doesn't hold at {where}") from error
            except Exception as error:  # the author's own code; what it raises belongs to the walk that led there
                raise Broken(name, f"{where}: the invariant itself raised {type(error).__name__}: {error}") from error


class untouched_generators:  # noqa: N801  a context manager, read as a phrase; a generator function costs more, at every step
    """Check that the block leaves the process's random generators (`random`, NumPy's legacy one) as they are."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        self._random = random.getstate()
        self._numpy = np.random.get_state()

    def __exit__(self, *raised: object) -> None:
        if raised[0] is not None:
            return
        if random.getstate() != self._random:
            raise Broken("global random state", f"{self._where} used or seeded the module random; draw from self.np_random")
        now: Any = np.random.get_state()
        then: Any = self._numpy
        if now[2:] != then[2:] or not np.array_equal(now[1], then[1]):
            raise Broken("global random state", f"{self._where} used or seeded numpy.random; draw from self.np_random")


def refuse_exception(outcome: Outcome, what: str) -> None:
    """Raise `Broken` if the outcome is an exception."""
    if outcome.error is None:
        return
    place = trace = outcome.error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = f"{type(outcome.error).__name__} at {place.tb_frame.f_code.co_filename}:{place.tb_lineno}" if place is not None else ""
    raise Broken(
        "exception",
        f"{what} raised {type(outcome.error).__name__}: {outcome.error}\n{_traceback(outcome.error, trace)}",
        where,
    )


def _traceback(error: BaseException, trace: Any) -> str:
    for _ in range(2):  # our own frames
        trace = trace.tb_next if trace is not None and trace.tb_next is not None else trace
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def written_ids(action: Any) -> list[str | None]:
    """The ids of an action's calls, in order; None where the model gave none, or one that UTF-8 can't carry back to it."""
    message = message_of(action)
    if message is None or not read_action(action).calls:
        return []
    given = [call.get("id") if isinstance(call, Mapping) else None for call in message["tool_calls"]]
    return [id_ if isinstance(id_, str) and id_ and printable(id_) == id_ else None for id_ in given]


def check_answers(where: str, messages: Sequence[Any], ids: Sequence[str | None]) -> None:
    """Check that the messages answer each call once, in order and with its id, before anything else is said."""
    waiting = list(ids)
    given = {id_ for id_ in ids if id_ is not None}
    made: set[str] = set()
    answered = 0
    for message in messages:
        if message["role"] != "tool":
            if waiting:
                raise Broken("answers", f"{where} left call {answered} ({_call_name(waiting[0])}) unanswered: {_roles(messages)}")
            if message["role"] == "assistant":
                waiting = [call["id"] for call in message.get("tool_calls") or ()]
            continue
        id_ = message["tool_call_id"]
        if not waiting:
            raise Broken("answers", f"{where} has a tool message that answers no call (tool_call_id {id_!r}): {_roles(messages)}")
        expected = waiting.pop(0)
        if expected is not None and id_ != expected:
            raise Broken("answers", f"{where} answered call {answered} with tool_call_id {id_!r}, not {expected!r}")
        if expected is None:
            if not id_ or id_ in given or id_ in made:
                raise Broken("answers", f"{where} answered call {answered}, which has no id, with {id_!r}: an id that isn't of its own")
            made.add(id_)
        answered += 1
    if waiting:
        raise Broken("answers", f"{where} left call {answered} ({_call_name(waiting[0])}) unanswered: {_roles(messages)}")


def _call_name(id_: str | None) -> str:
    return f"id {id_!r}" if id_ is not None else "which has no id"


def _roles(messages: Sequence[Any]) -> str:
    return f"its messages are {', '.join(message['role'] for message in messages)}" if messages else "it has no messages"


def _containers(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every object inside the value that can be changed, with its path."""
    if isinstance(value, dict):
        yield path, value
        for key, item in value.items():
            yield from _containers(f"{path}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        if isinstance(value, list):
            yield path, value
        for index, item in enumerate(value):
            yield from _containers(f"{path}[{index}]", item)
    elif isinstance(value, np.ndarray):
        yield path, value


def _entries(path: str, value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        yield f"{path}[{key!r}]", item
        if isinstance(item, dict):
            yield from _entries(f"{path}[{key!r}]", item)


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The value and everything inside it, with its path."""
    yield path, value
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ():
        yield from _parts(f"{path}[{key!r}]", item)
