"""Environments with one bug each, which `check_transitions` must find and name; and correct ones, which it must not.

`PLANTED` maps each class to the names of the invariants under which its bug may be reported. Most bugs need particular actions to show.
"""

from __future__ import annotations

import copy
import json
import math
import random
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded
from pydantic import BaseModel, Field

from art_gym import ToolEnv, ToolError, tool
from art_gym.spaces import ChatSpace, ToolCallSpace

PLANTED: dict[type[gymnasium.Env[Any, Any]], set[str]] = {}
"""Class → invariants."""


def bug(*invariants: str):
    """Enter a class in `PLANTED`."""

    def enter(cls):
        PLANTED[cls] = set(invariants)
        return cls

    return enter


class Counter(ToolEnv):
    """A task without a bug: add numbers up to a goal, remember words, stop."""

    instructions = "Add up to the goal, then stop."
    max_turns = 6
    reward_range = (-1.0, 1.0)

    def start(self) -> str:
        self.goal = int(self.np_random.integers(1, 20))
        self.count = 0
        self.words: list[str] = []
        return f"The goal is {self.goal}."

    @tool
    def add(self, amount: Annotated[int, Field(ge=0, le=9)]) -> str:
        """Add to the count."""
        self.count += amount
        return f"The count is {self.count}."

    @tool
    def remember(self, word: str) -> str:
        """Remember a word."""
        if not word:
            raise ToolError("Give a word.")
        self.words.append(word)
        return f"{len(self.words)} remembered."

    @tool
    def stop(self) -> str:
        """Stop counting."""
        right = self.count == self.goal
        self.finish(reward=1.0 if right else 0.0, success=right)
        return "Right." if right else "Wrong."


# State that isn't the instance's own.


@bug("shared state", "determinism")
class SharedList(Counter):
    """A list of the class, shared by all instances."""

    seen: ClassVar[list[str]] = []

    @tool
    def remember(self, word: str) -> str:
        """Remember a word."""
        self.seen.append(word)
        return f"{len(self.seen)} remembered."


@bug("shared state")
class SharedGoal(Counter):
    """The episode's secret is an attribute of the class: another instance's reset changes it."""

    def start(self) -> str:
        text = super().start()
        type(self).shared_goal = self.goal
        return text

    @tool
    def stop(self) -> str:
        """Stop counting."""
        self.finish(reward=0.0)
        return f"The goal was {type(self).shared_goal}."


@bug("shared state", "determinism")
class SharedOnce(Counter):
    """What the class remembers changes once in the life of the process, so that nothing shows it a second time."""

    opened: ClassVar[set[str]] = set()

    @tool
    def remember(self, word: str) -> str:
        """Remember a word."""
        new = not self.opened
        self.opened.add("opened")
        return "The book is opened." if new else "The book is open already."


@bug("shared state", "determinism", "reset")
class MutableDefault(Counter):
    """A mutable default argument outlives the call."""

    def note(self, word: str, notes: list[str] = []) -> int:  # noqa: B006  the bug
        notes.append(word)
        return len(notes)

    @tool
    def remember(self, word: str) -> str:
        """Remember a word."""
        return f"{self.note(word)} remembered."


# Randomness from elsewhere.


@bug("global random state", "determinism")
class GlobalRandom(Counter):
    """Draws from the module random."""

    @tool
    def stop(self) -> str:
        """Stop counting."""
        self.finish(reward=random.random())
        return "Stopped."


@bug("global random state", "determinism")
class GlobalNumpy(Counter):
    """Draws from numpy.random."""

    def start(self) -> str:
        return f"{super().start()} {np.random.randint(5)}"


@bug("global random state")
class SeedsGlobalRandom(Counter):
    """Seeds the module random: deterministic itself, and the whole process with it."""

    def start(self) -> str:
        random.seed(int(self.np_random.integers(100)))
        return super().start()


@bug("global random state", "determinism")
class HiddenGlobalRandom(Counter):
    """Draws from the module random, and puts its state back."""

    @tool
    def stop(self) -> str:
        """Stop counting."""
        state = random.getstate()
        text = f"Stopped: {random.random()}"
        random.setstate(state)
        self.finish()
        return text


@bug("determinism")
class OwnGenerator(Counter):
    """Draws from a generator of its own that nobody seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng()

    @tool
    def add(self, amount: Annotated[int, Field(ge=0, le=9)]) -> str:
        """Add to the count."""
        return f"The count is {int(self.rng.integers(1000)) + amount}."


@bug("hash order", "wall clock")
class HashOrder(Counter):
    """Lists a set in its own order."""

    @tool
    def stop(self) -> str:
        """Stop counting."""
        self.finish()
        return ", ".join({"north", "south", "east", "west", "up", "down"})


@bug("wall clock", "determinism")
class WallClock(Counter):
    """Tells the time of the day."""

    @tool
    def remember(self, word: str) -> str:
        """Remember a word."""
        return f"Remembered at {datetime.now():%H:%M}."


@bug("wall clock", "determinism")
class Epoch(Counter):
    """What it does depends on the time in whole minutes."""

    @tool
    def add(self, amount: Annotated[int, Field(ge=0, le=9)]) -> str:
        """Add to the count."""
        self.count += amount + int(time.time() // 60) % 7
        return f"The count is {self.count}."


# Resets and seeds.


@bug("reset", "determinism")
class LostReset(Counter):
    """The reset forgets a field."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    @tool
    def add(self, amount: Annotated[int, Field(ge=0, le=9)]) -> str:
        """Add to the count."""
        self.total += amount
        return f"The count is {self.total}."


@bug("reset")
class Opened(Counter):
    """The reset forgets a field that is set once: the same actions would set it to the same again."""

    def __init__(self) -> None:
        super().__init__()
        self.first: int | None = None

    @tool
    def open(self, box: Annotated[int, Field(ge=1, le=3)]) -> str:
        """Open a box; only the first one counts."""
        self.first = self.first or box
        return f"Box {self.first} is open."


@bug("reset")
class Memo(Counter):
    """The reset forgets what is memoised, though it depends on the episode."""

    def __init__(self) -> None:
        super().__init__()
        self.memo: dict[int, int] = {}

    @tool
    def look(self, place: Annotated[int, Field(ge=0, le=3)]) -> str:
        """Look at a place."""
        return f"There are {self.memo.setdefault(place, self.count)}."


@bug("reset")
class MemoOfTheSeed(Counter):
    """The reset forgets what is memoised for each seed."""

    def __init__(self) -> None:
        super().__init__()
        self.memo: dict[int, int] = {}

    @tool
    def look(self) -> str:
        """Look around."""
        return f"There are {self.memo.setdefault(self.np_random_seed, self.count)}."


@bug("reset", "determinism")
class FirstSeedOnly(Counter):
    """The seed counts only for the first episode of an instance."""

    def start(self) -> str:
        goal = getattr(self, "goal", None)
        text = super().start()
        if goal is not None:
            self.goal = goal
            return f"The goal is {goal}."
        return text


@bug("seed", "reset")
class SameSeedOtherEpisode(Counter):
    """The second reset with one seed gives another episode."""

    last: int | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        again = seed is not None and seed == self.last
        self.last = seed
        return super().reset(seed=seed + 1 if again and seed is not None else seed, options=options)


@bug("before reset")
class StepBeforeReset(Counter):
    """Takes a step before the first reset."""

    def step(self, action):
        if not self.turn and not self.np_random_seed_given:
            self.reset(seed=0)
        return super().step(action)

    np_random_seed_given = False

    def start(self) -> str:
        self.np_random_seed_given = True
        return super().start()


@bug("after the end")
class StepAfterEnd(Counter):
    """Takes steps after the episode's end."""

    def step(self, action):
        try:
            return super().step(action)
        except ResetNeeded:
            if not self.turn:
                raise
            return (), 0.0, True, False, {}


@bug("after the end")
class WrongErrorAfterEnd(Counter):
    """Raises something else after the episode's end."""

    def step(self, action):
        try:
            return super().step(action)
        except ResetNeeded as error:
            if not self.turn:
                raise
            raise RuntimeError(str(error)) from None


@bug("after the end")
class RefusedStepCounts(Counter):
    """A step after the end is refused, and draws from the generator all the same."""

    def step(self, action):
        try:
            return super().step(action)
        except ResetNeeded:
            self.np_random.random()
            raise


@bug("close")
class CloseTwice(Counter):
    """Can be closed once only."""

    resource: list[str] | None = None

    def close(self) -> None:
        if self.resource == []:
            raise ValueError("closed already")
        self.resource = []


# Snapshots.


@bug("snapshot")
class ForgetfulSnapshot(Counter):
    """The snapshot leaves a field out."""

    def snapshot(self):
        state = super().snapshot()
        del state["words"]
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore({**state, "words": getattr(self, "words", [])})


@bug("snapshot")
class ShallowSnapshot(Counter):
    """The snapshot shares a list with the episode that goes on."""

    def snapshot(self):
        return {**super().snapshot(), "words": self.words}


@bug("snapshot")
class SnapshotDraws(Counter):
    """Taking a snapshot draws a random number."""

    def snapshot(self):
        self.np_random.random()
        return super().snapshot()

    @tool
    def add(self, amount: Annotated[int, Field(ge=0, le=9)]) -> str:
        """Add to the count."""
        return f"The count is {int(self.np_random.integers(1000)) + amount}."


# Rewards and flags.


@bug("reward")
class RewardNaN(Counter):
    """The reward is no number when the count is large."""

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, math.nan if self.count > 15 else reward, terminated, truncated, info


@bug("reward range")
class RewardOutOfRange(Counter):
    """The reward passes the range that is promised."""

    def on_invalid(self, problem: str) -> None:
        self.reward("invalid", -0.6)


@bug("reward components")
class RewardNotSum(Counter):
    """The components don't add up to the reward."""

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, min(1.0, reward + 0.1 * (info["tool_errors"] > 0)), terminated, truncated, info


@bug("reward")
class RewardBool(Counter):
    """The reward is a bool."""

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, terminated if terminated else reward, terminated, truncated, info


@bug("flags")
class BothFlags(Counter):
    """An episode that ends on its last turn is both terminated and truncated."""

    max_turns = 3

    def step(self, action):
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, self.turn >= 3, info


@bug("flags")
class NumpyFlag(Counter):
    """A flag is of NumPy's bool."""

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, np.bool_(terminated), truncated, info


# Observations.


@bug("observation aliased")
class AliasedObservation(Counter):
    """The same message object is returned again and again."""

    hint: ClassVar[dict[str, Any]] = {"role": "user", "content": "Go on."}

    def step(self, action):
        observation, *rest = super().step(action)
        return (*observation, self.hint), *rest


@bug("observation mutated")
class GrowingObservation(Counter):
    """A message that was returned is written to later."""

    def step(self, action):
        result = super().step(action)
        if getattr(self, "shown", None) and self.turn > 1:
            self.shown[-1]["content"] += " (old)"
        self.shown = result[0]
        return result


@bug("observation aliased")
class KeepsObservation(Counter):
    """It keeps what it returned, and goes by it later; the caller may have changed it."""

    def step(self, action):
        last = "".join(message.get("content", "gone") for message in getattr(self, "shown", ()))
        observation, *rest = super().step(action)
        self.shown = observation
        shown = [{**message, "content": f"{message['content']} ({len(last)})"} for message in observation]
        return (tuple(shown), *rest) if self.turn > 2 else (observation, *rest)

    def start(self) -> str:
        self.shown = ()
        return super().start()


@bug("observation space")
class NoObservation(Counter):
    """The observation is a list, not a tuple, after a tool's error."""

    def step(self, action):
        observation, *rest = super().step(action)
        return (list(observation) if rest[3]["tool_errors"] else observation), *rest


@bug("action mutated")
class ChangesAction(Counter):
    """It writes into the action."""

    def step(self, action):
        if isinstance(action, dict) and isinstance(action.get("tool_calls"), list):
            for index, call in enumerate(action["tool_calls"]):
                if isinstance(call, dict):
                    call.setdefault("id", f"call_{index}")
        return super().step(action)


# Answers.


@bug("answers")
class UnansweredCall(Counter):
    """Of several calls the last isn't answered."""

    def step(self, action):
        observation, *rest = super().step(action)
        return (observation[:2] if len(observation) > 2 else observation), *rest


@bug("answers")
class WrongId(Counter):
    """Answers carry ids of its own."""

    def step(self, action):
        observation, *rest = super().step(action)
        renamed = [
            {**message, "tool_call_id": f"call_{index}"} if message["role"] == "tool" else message for index, message in enumerate(observation)
        ]
        return tuple(renamed), *rest


@bug("answers")
class WrongOrder(Counter):
    """Answers come in the reverse order."""

    def step(self, action):
        observation, *rest = super().step(action)
        return observation[::-1], *rest


@bug("answers")
class AnsweredTwice(Counter):
    """A call that failed is answered twice."""

    def step(self, action):
        observation, *rest = super().step(action)
        return (*observation, *[dict(message) for message in observation if rest[3]["tool_errors"]]), *rest


@bug("answers")
class UnaskedAnswer(Counter):
    """A message without calls gets a tool message."""

    def step(self, action):
        observation, *rest = super().step(action)
        if observation and observation[0]["role"] == "user":
            observation = ({"role": "tool", "tool_call_id": "none", "content": observation[0]["content"]},)
        return observation, *rest


# Exceptions.


@bug("exception")
class RaisesOnBadInput(Counter):
    """Reads the arguments of a call without care."""

    def step(self, action):
        for call in (action.get("tool_calls") or ()) if isinstance(action, dict) else ():
            json.loads(call["function"]["arguments"])
        return super().step(action)


@bug("exception")
class RaisesOnUnknownTool(Counter):
    """Looks the tool up without care."""

    def step(self, action):
        result = super().step(action)
        if isinstance(action, dict) and isinstance(action.get("tool_calls"), list):
            for call in action["tool_calls"]:
                name = call.get("function", {}).get("name") if isinstance(call, dict) and isinstance(call.get("function"), dict) else None
                if isinstance(name, str) and name:
                    getattr(self, name.strip().lower())
        return result


@bug("exception")
class RaisesOnGoodInput(Counter):
    """Divides by zero for one argument of ten, after the first turn."""

    @tool
    def add(self, amount: Annotated[int, Field(ge=0, le=9)]) -> str:
        """Add to the count."""
        self.count += 10 // (amount - 7) if self.turn > 1 else amount
        return f"The count is {self.count}."


@bug("exception")
class RaisesOnSuccess(Counter):
    """Success alone raises, and success takes a word from the first message."""

    def start(self) -> str:
        text = super().start()
        self.password = f"{'abcdefgh'[int(self.np_random.integers(8))]}{int(self.np_random.integers(100, 999))}"
        return f"{text} The password is {self.password}."

    @tool
    def say_password(self, word: str) -> str:
        """Say the password."""
        if word == self.password:
            raise RuntimeError("nobody ever came here")
        return "Wrong."


# Infos.


@bug("info types")
class MixedTypes(Counter):
    """An entry of the info is an int, and later a float."""

    def step(self, action):
        *rest, info = super().step(action)
        return *rest, {**info, "score": self.count / 2 if self.count % 2 else self.count // 2}


@bug("info types")
class MixedTypesBetweenEpisodes(Counter):
    """An entry of the info is an int in one episode and a text in another."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        observation, info = super().reset(seed=seed, options=options)
        return observation, {**info, "goal": self.goal if self.goal < 10 else str(self.goal)}


@bug("info")
class InfoNone(Counter):
    """An entry of the info is None until it is known."""

    def step(self, action):
        *rest, info = super().step(action)
        return *rest, {**info, "word": self.words[-1] if self.words else None}


@bug("info")
class InfoNotJson(Counter):
    """An entry of the info has no JSON form."""

    def step(self, action):
        *rest, info = super().step(action)
        return *rest, {**info, "goal": np.int64(self.goal)}


@bug("info mutated", "observation aliased")
class SharedInfo(Counter):
    """One info object for all steps, written to again at each."""

    def start(self) -> str:
        self.log: list[int] = []
        return super().start()

    def step(self, action):
        *rest, info = super().step(action)
        self.log.append(self.count)
        return *rest, {**info, "log": self.log}


# Rendering.


@bug("render")
class RenderAdvances(Counter):
    """Rendering counts."""

    def render(self):
        self.count += 1
        return super().render()


class Plain(gymnasium.Env[Any, Any]):
    """A correct environment of messages that isn't a `ToolEnv`: it echoes."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(self) -> None:
        self.observation_space = ChatSpace()
        self.action_space = ToolCallSpace({})
        self.running = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.running = True
        return ({"role": "user", "content": f"Say {int(self.np_random.integers(100))}."},), {}

    def step(self, action):
        if not self.running:
            raise ResetNeeded("call reset first")
        content = action.get("content") if isinstance(action, dict) else None
        self.running = content != ""
        return (*self.answers(action), {"role": "user", "content": "Go on."}), 0.0, content == "", False, {}

    def answers(self, action):
        calls = action.get("tool_calls") if isinstance(action, dict) and action.get("role", "assistant") == "assistant" else None
        ids = [call.get("id") if isinstance(call, dict) else None for call in calls] if isinstance(calls, list) else []
        return [
            {"role": "tool", "tool_call_id": id_ if isinstance(id_, str) and id_ else f"made-{index}", "content": "There are no tools."}
            for index, id_ in enumerate(ids)
        ]


@bug("answers")
class PlainUnanswered(Plain):
    """Written without `ToolEnv`, it takes a call without an id for none."""

    def answers(self, action):
        return [answer for answer in super().answers(action) if not answer["tool_call_id"].startswith("made-")]


# Correct ones, some of them odd.


class Silent(ToolEnv):
    """No tools, no instructions, no first message."""

    max_turns = 3

    def on_text(self, text: str) -> str:
        if "bye" in text:
            self.finish(success=True)
        return text[::-1]


class Talk(ToolEnv):
    """A message ends the episode, with an async `on_text`."""

    instructions = "Answer."

    def start(self) -> list[Any]:
        return [
            {"role": "user", "content": "What is the capital of France?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "a", "type": "function", "function": {"name": "ask", "arguments": ""}}],
            },
            {"role": "tool", "tool_call_id": "a", "content": "Paris."},
            {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
        ]

    async def on_text(self, text: str) -> None:  # type: ignore[override]
        self.finish(reward=1.0 if "Paris" in text else 0.0)

    @tool
    async def ask(self, question: str = "") -> str:
        """Ask."""
        return question.upper()


class Place(BaseModel):
    """A place in a tree of places."""

    name: str
    level: Literal["city", "land"] = "city"
    inside: list[Place] = []


class Nested(ToolEnv):
    """Tools with nested, recursive, optional and free-form parameters."""

    max_turns = 8
    max_parallel_calls = 2

    def start(self) -> str:
        self.places: dict[str, Any] = {}
        self.rng_state = copy.deepcopy(self.np_random.bit_generator.state)
        return "Describe places."

    @tool(name="add-place")
    def add_place(self, place: Place, tags: set[str] | None = None, scores: dict[str, float] | None = None) -> dict[str, Any]:
        """Add a place."""
        self.places[place.name] = place.model_dump()
        self.reward("added", 0.1)
        return {"places": len(self.places), "tags": sorted(tags or ()), "scores": scores}

    @tool
    def roll(self) -> int:
        """Roll a die."""
        return int(self.np_random.integers(1, 7))


CORRECT = (Counter, Plain, Silent, Talk, Nested)
