"""Every invariant, checked on one walk.

The walk is played by a fresh instance alone, under watch. What that gave is what every other way of playing the same actions from the same seed
must give: another instance beside a third one that plays something else, with the process's random generators set differently, rendered and
snapshotted on the way; an instance that has played before; the same one again, its caller changing whatever it gets hold of; snapshots restored
into it and into another. Where an outcome differs, the ways are tried one by one to say which made the difference.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded

from art_gym.messages import say
from art_gym.spaces import ToolCallSpace
from art_gym.testing._layers import Layers
from art_gym.testing._outcomes import Outcome, Walk, brief, compare_texts, copied, difference, do_reset, do_reset_unseeded, do_step, play
from art_gym.testing._watch import Broken, Invariant, Target, Transition, Watch, untouched_generators
from art_gym.testing.strategies import first_scenarios, starting_split

Env = gymnasium.Env[Any, Any]

RESETS = 6
"""Resets with one seed that must all give one episode."""

TRIES = 3
"""Steps after an episode's end, or before the first reset, all of which must be refused."""

_NO_SNAPSHOT = (
    "an environment that holds what can't be copied, such as a connection, overrides snapshot and restore, or has none: "
    "snapshot = restore = None in its class"
)

_STARTS = 16
"""Scenarios among which another start is looked for."""

_ALL_CUTS = 6
_SUFFIX = 8


@dataclass(slots=True)
class Played:
    """What a walk gave where nothing was broken.

    Attributes:
        texts: The outcome of the reset and of each step, as text.
        transitions: The steps.
        types: Type of every entry of the infos, by its path.
        score: The largest that the target returned; None without one, or without a step.
    """

    texts: list[str] = field(default_factory=list)
    transitions: list[Transition] = field(default_factory=list)
    types: dict[str, str] = field(default_factory=dict)
    score: float | None = None


class WalkChecker:
    """Checks walks of the environments that `make` makes."""

    def __init__(self, make: Callable[[], Env], layers: Layers, invariants: Sequence[Invariant] = ()) -> None:
        self._make = make
        self._layers = layers
        self._invariants = invariants
        self._others: list[Walk] | None = None

    def check(self, walk: Walk, target: Target | None = None) -> Broken | Played:
        """Check every invariant on the walk; the process's random generators are as before afterwards.

        Args:
            walk: What is played.
            target: Called with every transition, at the time of its step.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(kept_generators())
            try:
                return self._check(walk, stack, target)
            except Broken as broken:
                # Without its traceback, which would hold on to the environments.
                return broken.with_traceback(None)

    def _check(self, walk: Walk, stack: contextlib.ExitStack, target: Target | None) -> Played:
        _seed_generators(1)
        with untouched_generators("making the environment"):
            first = self._new(stack)
        watch = Watch(first, self._layers, self._invariants, target)
        texts = [outcome.text for outcome in self._play_watched(watch, first, walk)]
        played = Played(texts, watch.transitions, watch.types, watch.score)
        following = watch.reset(walk, unseeded=True)
        watch.check_returned()

        second, other = self._new(stack), self._new(stack)
        self._refuse_steps_before_reset(other, walk)
        snapshots = self._play_disturbed(second, other, walk, [*played.texts, following.text], stack)
        watch.check_returned()
        try:
            what = "an instance that has played another episode, reset to the seed, gave something else"
            self._compare("reset", what, other, walk, played.texts)
            self._restore(snapshots, (other, second), walk, played.texts)
        except Broken as broken:
            raise self._blamed(broken, walk, played.texts, stack) from None
        self._reset_again(first, walk, played.texts)
        self._reset_after_the_reverse(walk, played.texts, stack)
        for env in (first, second, other):
            _close_twice(env)
        return played

    def _new(self, stack: contextlib.ExitStack) -> Env:
        try:
            env = self._make()
        except Exception as error:
            raise Broken("exception", f"making the environment raised {type(error).__name__}: {error}") from error
        stack.callback(_close_quietly, env)
        return env

    # The ways of playing.

    def _play_watched(self, watch: Watch, env: Env, walk: Walk) -> list[Outcome]:
        last = watch.reset(walk)
        for action in walk.actions:
            if last.over:
                self._refuse_steps_after_the_end(env, action)
                watch.reset(walk, unseeded=True)
            last = watch.step(action, broken=not contains(env.action_space, action))
        if last.over:
            self._refuse_steps_after_the_end(env, walk.actions[-1])
        return list(watch.outcomes)

    def _refuse_steps_after_the_end(self, env: Env, action: Any) -> None:
        if self._layers.checks("after the end"):
            _require_reset_needed(env, action, "after the end", "after the episode's end")

    def _refuse_steps_before_reset(self, env: Env, walk: Walk) -> None:
        _require_reset_needed(env, walk.actions[0] if walk.actions else say("hello"), "before reset", "before the first reset")

    def _play_disturbed(self, env: Env, other: Env, walk: Walk, expected: list[str], stack: contextlib.ExitStack) -> list[_Snapshot]:
        snapshots: list[_Snapshot] = []
        _seed_generators(2)
        disturbances = [self._rendering(env), self._snapshotting(env, walk, snapshots), self._playing(other, walk)]
        texts = _texts(env, walk, self._layers.ignored, disturbances, following=True)
        if texts != expected:
            raise self._explained(walk, expected, texts, stack)
        return snapshots

    def _explained(self, walk: Walk, expected: list[str], texts: list[str], stack: contextlib.ExitStack) -> Broken:
        """Find out which disturbance made the difference; `expected` and `texts` end with the reset after the episode."""

        def found(seed: int, disturb: Callable[[Env], list[_Disturbance]], *, refused: bool = False) -> list[str]:
            _seed_generators(seed)
            env = self._new(stack)
            return _texts(env, walk, self._layers.ignored, disturb(env), refused=refused, following=True)

        alone = found(1, lambda env: [])
        if alone != expected:
            if found(1, lambda env: [], refused=True) == expected:
                what = "a step after the end, though it was refused, changed the next episode"
                return Broken("after the end", f"{what} {compare_texts(alone, expected)}")
            return Broken(
                "determinism", f"another instance, with the same seed and actions, gave something else {compare_texts(expected, alone)}"
            )
        ways: list[tuple[str, str, int, Callable[[Env], list[_Disturbance]]]] = [
            ("global random state", "random and numpy.random seeded otherwise", 3, lambda env: []),
            ("render", "rendered on the way", 1, lambda env: [self._rendering(env)]),
            ("snapshot", "with snapshots taken on the way", 1, lambda env: [self._snapshotting(env, walk, [])]),
        ]
        for invariant, what, seed, disturb in ways:
            if (other := found(seed, disturb)) != expected:
                return Broken(invariant, f"{what}, the same seed and actions gave something else {compare_texts(expected, other)}")
        return Broken(
            "shared state", f"while another instance played another episode, this one gave something else {compare_texts(expected, texts)}"
        )

    def _blamed(self, broken: Broken, walk: Walk, expected: list[str], stack: contextlib.ExitStack) -> Broken:
        """Look whether another instance's resets alone, to one seed after the other, or the rendering make the difference."""
        env, other = self._new(stack), self._new(stack)

        def reset_other(turn: int, place: int) -> None:
            for seed in range(walk.seed + 1, walk.seed + 4):
                do_reset(other, Walk(seed, walk.options, ()))

        texts = _texts(env, walk, self._layers.ignored, [reset_other])
        if texts != expected:
            return Broken("shared state", f"while another instance was reset, this one gave something else {compare_texts(expected, texts)}")
        if broken.invariant == "snapshot":
            snapshots: list[_Snapshot] = []
            _texts(env, walk, self._layers.ignored, [self._snapshotting(env, walk, snapshots)])
            try:
                self._restore(snapshots, (other, env), walk, expected)
            except Broken:
                return broken
            return Broken("render", f"rendered on the way, and {broken.problem}")
        return broken

    def _reset_again(self, env: Env, walk: Walk, expected: list[str]) -> None:
        for count in range(2, RESETS + 1):
            outcome = do_reset(env, walk, self._layers.ignored)
            if outcome.text != expected[0]:
                raise Broken("seed", f"reset(seed={walk.seed}) for time {count} gave another episode: {difference(expected[0], outcome.text)}")
        texts = _texts(env, walk, self._layers.ignored, [], changing=True)
        if texts == expected:
            return
        self._compare("seed", f"after {RESETS} resets with seed {walk.seed}, the same actions gave something else", env, walk, expected)
        raise Broken(
            "observation aliased",
            "when the caller changes the observation, info and action objects after each step, the environment gives something else "
            f"{compare_texts(expected, texts)}: it keeps them, or what is inside them; keep copies",
        )

    def _reset_after_the_reverse(self, walk: Walk, expected: list[str], stack: contextlib.ExitStack) -> None:
        """Play the actions in another order before the reset: what is set once, or memoised, would be set to the same by the same actions."""
        if len(walk.actions) < 2:  # the same in reverse
            return
        env = self._new(stack)
        start = self._other_start(env, walk)
        for seed, options in ((start.seed, start.options), (walk.seed, walk.options)):
            if play(env, Walk(seed, options, walk.actions[::-1]), self._layers.ignored)[-1].error is not None:
                return  # another walk shows by itself that these actions raise
        what = f"an instance that has played the same actions in reverse from seeds {start.seed} and {walk.seed}, reset to the seed,"
        self._compare("reset", f"{what} gave something else", env, walk, expected)

    def _restore(self, snapshots: Sequence[_Snapshot], envs: Sequence[Env], walk: Walk, expected: list[str]) -> None:
        for snapshot in snapshots:
            for env, which in zip(envs, ("another instance", "the same instance"), strict=True):
                what = f"into {which}, from a snapshot after {_steps(snapshot.turn)}"
                try:
                    env.get_wrapper_attr("restore")(snapshot.state)
                except Exception as error:
                    raise Broken("snapshot", f"restore {what}, raised {_told(error)}") from error
                for index, action in enumerate(walk.actions[snapshot.turn : snapshot.turn + _SUFFIX]):
                    outcome = do_step(env, copied(action), self._layers.ignored)
                    if outcome.text != (before := expected[snapshot.place + index]):
                        step = f"step {snapshot.turn + index + 1}"
                        raise Broken("snapshot", f"restored {what}, {step} gave something else: {difference(before, outcome.text)}")
                    if outcome.over:
                        break

    def _compare(self, invariant: str, what: str, env: Env, walk: Walk, expected: list[str]) -> None:
        texts = _texts(env, walk, self._layers.ignored, [])
        if texts != expected:
            raise Broken(invariant, f"{what} {compare_texts(expected, texts)}")

    # The disturbances: each is called before every step, with the number of steps and of outcomes so far.

    def _rendering(self, env: Env) -> _Disturbance:
        inner: Any = env.unwrapped
        if inner.render_mode is None and hasattr(inner, "tools") and "ansi" in inner.metadata.get("render_modes", ()):
            inner.render_mode = "ansi"  # a ToolEnv looks at it when it renders

        def render(turn: int, place: int) -> None:
            if env.render_mode is None:
                return
            try:
                env.render()
            except Exception as error:
                raise Broken("render", f"render after {_steps(turn)} raised {_told(error)}") from error

        return render

    def _snapshotting(self, env: Env, walk: Walk, into: list[_Snapshot]) -> _Disturbance:
        count = len(walk.actions)
        cuts = set(range(count)) if count <= _ALL_CUTS else {0, 1, count // 4, count // 2, 3 * count // 4, count - 1}

        def take(turn: int, place: int) -> None:
            if turn not in cuts or not self._layers.checks("snapshot"):
                return
            try:
                into.append(_Snapshot(turn, place, env.get_wrapper_attr("snapshot")()))
            except Exception as error:
                raise Broken("snapshot", f"snapshot after {_steps(turn)} raised {_told(error)}; {_NO_SNAPSHOT}") from error

        return take

    def _playing(self, other: Env, walk: Walk) -> _Disturbance:
        start = self._other_start(other, walk)

        def play_on(turn: int, place: int) -> None:
            if turn == 0:
                do_reset(other, start)
            if do_step(other, copied(walk.actions[turn])).over:
                do_reset_unseeded(other, start)

        return play_on

    def _other_start(self, env: Env, walk: Walk) -> Walk:
        """Another start, with options that the walk's own lacks if there is one: these would stay where a reset forgets to take them back."""
        if self._others is None:
            found = first_scenarios(env, starting_split(env), _STARTS) or ()
            self._others = [Walk(scenario.seed, scenario.options, ()) for scenario in found]
        others = [other for other in self._others if (other.seed, other.options) != (walk.seed, walk.options)]
        return max(others, key=lambda other: _news(other, walk), default=Walk(walk.seed + 1, walk.options, ()))


_Disturbance = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A snapshot after `turn` steps; the next step's outcome is at `place`."""

    turn: int
    place: int
    state: Any


def _texts(
    env: Env,
    walk: Walk,
    ignored: str | None,
    disturbances: Sequence[_Disturbance],
    *,
    changing: bool = False,
    refused: bool = False,
    following: bool = False,
) -> list[str]:
    """Play the walk and return its outcomes.

    Args:
        env: What plays.
        walk: What is played.
        ignored: Key of the info to leave out.
        disturbances: Called before every step.
        changing: Change every object that comes back, and the action, after each step; they are put right at the end.
        refused: Try steps after each episode's end, as the watched instance does.
        following: Reset without a seed at the end, which is the last outcome then.
    """
    outcomes = [do_reset(env, walk, ignored)]
    changed: list[tuple[Any, Any]] = []
    for turn, action in enumerate(walk.actions):
        if changing:
            _empty(list(outcomes[-1].values), changed)
        if outcomes[-1].over and outcomes[-1].error is None:
            if refused:
                _try_steps(env)
            outcomes.append(do_reset_unseeded(env, walk, ignored))
        if outcomes[-1].error is not None:
            break
        for disturb in disturbances:
            disturb(turn, len(outcomes))
        sent = copied(action)
        outcomes.append(do_step(env, sent, ignored))
        if changing:
            _empty(sent, changed)
    if refused and outcomes[-1].over:
        _try_steps(env)
    if following:
        outcomes.append(do_reset_unseeded(env, walk, ignored))
    for value, content in reversed(changed):
        if isinstance(value, dict):
            value.clear()
            value.update(content)
        else:
            value[:] = content
    return [outcome.text for outcome in outcomes]


def _try_steps(env: Env) -> None:
    for _ in range(TRIES):
        do_step(env, say("hello"))


def _empty(value: Any, changed: list[tuple[Any, Any]]) -> None:
    """Empty every dictionary and list inside the value, as a careless caller might, and note what was in them."""
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            _empty(item, changed)
    if isinstance(value, dict | list):
        changed.append((value, value.copy()))
        value.clear()


def _news(other: Walk, walk: Walk) -> tuple[int, int]:
    """How many options the other walk has that this one lacks, and how many that are others in this one."""
    missing = other.options.keys() - walk.options.keys()
    return len(missing), sum(other.options[name] != walk.options[name] for name in other.options.keys() - missing)


def _require_reset_needed(env: Env, action: Any, invariant: str, when: str) -> None:
    # What is broken must be answered, but the order in which an environment looks at things is its own.
    fits = contains(env.action_space, action) or not isinstance(env.action_space, ToolCallSpace)
    for count in range(1, TRIES + 1):
        outcome = do_step(env, copied(action) if fits else say("hello"))
        tried = f"step {when}" + (f", tried for time {count}," if count > 1 else "")
        if outcome.error is None:
            raise Broken(invariant, f"{tried} was accepted and returned {brief(outcome.values)}; it must raise gymnasium.error.ResetNeeded")
        if not isinstance(outcome.error, ResetNeeded):
            raise Broken(invariant, f"{tried} must raise gymnasium.error.ResetNeeded, and raised {_told(outcome.error)}")


def _close_twice(env: Env) -> None:
    for count in ("once", "a second time"):
        try:
            env.close()
        except Exception as error:
            raise Broken("close", f"close called {count} raised {_told(error)}") from error


def _close_quietly(env: Env) -> None:
    with contextlib.suppress(Exception):
        env.close()


def contains(space: gymnasium.Space[Any], action: Any) -> bool:
    """Whether the action is one of the space."""
    try:
        return bool(space.contains(action))
    except Exception:  # noqa: BLE001  other packages' spaces may raise on what isn't theirs
        return False


def _steps(count: int) -> str:
    return f"{count} step{'s'[: count != 1]}"


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _seed_generators(number: int) -> None:
    random.seed(number)
    np.random.seed(number)


def fresh_texts(make: Callable[[], Env], walk: Walk, ignored: str | None) -> list[str]:
    """Play the walk in a new environment and return its outcomes as text; the process's random generators are as before afterwards."""
    with kept_generators():
        env = make()
        texts = _texts(env, walk, ignored, [])
        _close_quietly(env)
    return texts


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """Put the process's random generators back at the end."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
