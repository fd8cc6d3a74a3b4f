"""The search for a walk that breaks something: by Hypothesis here, and in another interpreter.

Two kinds of bugs need more than Hypothesis: those that only another interpreter shows (hash order, the clock), where it is part of the loop,
and those that show once in a process (what a class remembers), where nothing fails when it is played again; these are shrunk by leaving out
actions, each time in a process in which nothing has been played.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import hypothesis
from hypothesis.errors import Flaky, Unsatisfiable
from hypothesis.strategies import SearchStrategy

from art_gym.errors import UsageError
from art_gym.testing._elsewhere import clock_alone, named
from art_gym.testing._factory import Factory
from art_gym.testing._layers import Layers
from art_gym.testing._outcomes import Walk, brief, compare_texts, frozen
from art_gym.testing._replica import NoReplica, Replica
from art_gym.testing._report import TransitionReport, TransitionViolation, told
from art_gym.testing._simplify import simplified
from art_gym.testing._walk import Played, WalkChecker, fresh_texts
from art_gym.testing._walks import known_starts, plain_actions, walks
from art_gym.testing._watch import Broken, Invariant, Target

_PARTS = (0.2, 0.3, 0.5)
"""Shares of the examples; after each part the words of the environment's own messages become arguments to try."""

_SAMPLES = 10
_TOGETHER = 16
"""Walks that the other interpreter plays in one process."""

_SHRINK_SECONDS, _SHRINK_WALKS = 1.5, 20
"""How long Hypothesis may shrink: seconds, and as many times what the broken walk took. What is superfluous then is left out one by one."""

_NOWHERE = Walk(0, {}, [])


class _TimeIsUp(BaseException):
    """Shrinking has taken long enough. Hypothesis takes any `Exception` for another failure."""


class _Found(Exception):
    """A walk breaks an invariant."""

    def __init__(self, walk: Walk, broken: Broken) -> None:
        super().__init__(str(broken))
        self.walk = walk
        self.broken = broken


@dataclass(slots=True)
class _Part:
    """A part of the examples: what they are drawn from, and what was played."""

    strategy: SearchStrategy[Walk]
    seed: int
    examples: int
    played: list[tuple[Walk, list[str]]] = field(default_factory=list)


class Search:
    """Looks for a walk that breaks an invariant, part by part, and reports the smallest it finds."""

    def __init__(
        self, factory: Factory, invariants: Sequence[Invariant], target: Target | None, settings: hypothesis.settings, seed: int
    ) -> None:
        self._factory = factory
        self._invariants = invariants
        self._target = target
        self._settings = settings
        self._seed = seed
        with contextlib.ExitStack() as stack:
            self._probe = factory.probe()
            stack.callback(self._close_probe)
            self._layers = Layers(self._probe)
            self._plain = plain_actions(self._probe.action_space)
            self._stack = stack.pop_all()
        self._skipped = [f"{invariant}: {why}" for invariant, why in self._layers.skipped.items()]
        self._checker = WalkChecker(factory, self._layers, invariants)
        self._replica: Replica | None = None
        self._first: _Found | None = None
        self._failed: dict[str, _Found] = {}
        self._patience = _SHRINK_SECONDS
        self._until = 0.0
        self._steps = 0
        self._types: dict[str, dict[str, Walk]] = {}

    def __enter__(self) -> Search:
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def run(self) -> TransitionReport:
        try:
            # It gets ready while the examples are played here.
            self._replica = closing(self._stack, Replica(self._factory, hash_seed=_hash_seed(self._seed)))
        except NoReplica as error:
            self._skip_other_processes(str(error))
        self._check_spaces()
        parts: list[_Part] = []
        for index, count in enumerate(_shares(self._settings.max_examples)):
            played = itertools.chain.from_iterable(part.played for part in parts)
            part = _Part(walks(self._probe, known_starts(played, self._probe.action_space)), self._seed + index, count)
            self._play(part)
            self._compare_processes(part)
            parts.append(part)
        self._check_types()
        return TransitionReport(sum(len(part.played) for part in parts), self._steps, tuple(self._skipped))

    def _check_spaces(self) -> None:
        another = self._factory()
        with contextlib.closing(another):
            if another.action_space != self._probe.action_space:
                raise self._violation(_NOWHERE, Broken("action space", "two instances have different action spaces"))
        for name in ("action_space", "observation_space"):
            space: gymnasium.Space[Any] = copy.deepcopy(getattr(self._probe, name))
            for number in range(_SAMPLES):
                space.seed(number)
                try:
                    sample = space.sample()
                    fits = space.contains(sample)
                except Exception as error:
                    raise self._violation(
                        _NOWHERE, Broken(name.replace("_", " "), f"sampling {name} raised {type(error).__name__}: {error}")
                    ) from error
                if not fits:
                    raise self._violation(_NOWHERE, Broken(name.replace("_", " "), f"a sample of {name} isn't in it: {brief(sample)}"))

    # Playing the examples here.

    def _play(self, part: _Part) -> None:
        try:
            self._search(part, self._look)
        except _Found as error:
            found = error
        except _TimeIsUp:
            found = self._smallest()
        except Flaky as error:
            raise self._unsteady(
                self._first or _Found(_NOWHERE, Broken("determinism", f"what it offers isn't the same each time: {error}"))
            ) from None
        except Unsatisfiable as error:
            raise UsageError(f"{self._factory.name}: no action could be drawn from its action space: {error}") from error
        else:
            return
        # Out of the handler, or the environment's own exceptions would name this one as their context.
        raise self._shortened(found)

    def _search(self, part: _Part, look: Callable[[Walk, _Part], _Found | None]) -> None:
        @hypothesis.seed(part.seed)
        @hypothesis.settings(self._settings, max_examples=part.examples, report_multiple_bugs=False)
        @hypothesis.given(walk=part.strategy)
        def search(walk: Walk) -> None:
            found = look(walk, part)
            if found is not None:
                raise found

        search()

    def _look(self, walk: Walk, part: _Part) -> _Found | None:
        if self._first is not None:
            # Hypothesis plays what broke again, which some bugs don't survive; and shrinking must end in time.
            known = self._failed.get(frozen([walk.seed, walk.options, walk.actions]))
            if known is not None:
                return known
            if time.perf_counter() > self._until:
                raise _TimeIsUp
        began = time.perf_counter()
        result = self._checker.check(walk, self._target if self._first is None else None)
        if isinstance(result, Played):
            if self._first is None:
                self._note(walk, result, part)
            return None
        found = _Found(walk, result)
        if self._first is None:
            self._first = found
            self._patience = _SHRINK_SECONDS + _SHRINK_WALKS * (time.perf_counter() - began)
            self._until = time.perf_counter() + self._patience
        # What is shrunk stays the same bug.
        if result.key != self._first.broken.key:
            return None
        self._failed[frozen([walk.seed, walk.options, walk.actions])] = found
        return found

    def _smallest(self) -> _Found:
        return min(self._failed.items(), key=lambda item: (len(item[1].walk.actions), len(item[0])))[1]

    def _note(self, walk: Walk, result: Played, part: _Part) -> None:
        part.played.append((walk, result.texts))
        self._steps += len(result.transitions)
        for path, kind in result.types.items():
            known = self._types.setdefault(path, {})
            if kind not in known or len(walk.actions) < len(known[kind].actions):
                known[kind] = walk
        if result.score is not None:
            hypothesis.target(result.score)

    def _check_types(self) -> None:
        for path, kinds in self._types.items():
            if len(kinds) > 1:
                (kind, walk), (other_kind, other) = itertools.islice(kinds.items(), 2)
                problem = f"{path} is of type {other_kind}, and in another episode, from seed {walk.seed}, of type {kind}"
                raise self._violation(other, Broken("info types", problem), beside=walk)

    # Playing them elsewhere.

    def _compare_processes(self, part: _Part) -> None:
        replica = self._replica
        if replica is None:
            return
        try:
            # Some at a time, from the last to the first: what one leaves behind for good shows in those that have another one before them.
            for end in range(len(part.played), 0, -_TOGETHER):
                played = part.played[max(end - _TOGETHER, 0) : end][::-1]
                elsewhere = replica.texts([walk for walk, _ in played], self._layers.ignored)
                for (walk, expected), actual in zip(played, elsewhere, strict=True):
                    if expected != actual:
                        raise self._elsewhere(replica, part, walk, compare_texts(expected, actual))
        except NoReplica as error:
            self._skip_other_processes(str(error))

    def _elsewhere(self, replica: Replica, part: _Part, seen: Walk, problem: str) -> TransitionViolation:
        """Report a difference between the processes: the smallest that still shows; as it was seen where the other process can't go on."""
        try:
            return self._smallest_elsewhere(replica, part, seen, problem)
        except NoReplica as error:
            what = "in another process, with another PYTHONHASHSEED and another clock, the same seed and actions gave something else"
            return self._violation(seen, Broken("hash order", f"{what} {problem} (seen once; after that, {error})"))

    def _smallest_elsewhere(self, replica: Replica, part: _Part, seen: Walk, problem: str) -> TransitionViolation:
        """Shrink the difference, with the other process in the loop: the same seed draws the same walks again."""
        failed: dict[str, _Found] = {}
        until = time.perf_counter() + _SHRINK_SECONDS

        def look(walk: Walk, part: _Part) -> _Found | None:
            key = frozen([walk.seed, walk.options, walk.actions])
            if failed and key not in failed and time.perf_counter() > until:
                raise _TimeIsUp
            try:
                if key not in failed and (problem := self._other_outcome(replica, walk)):
                    failed[key] = _Found(walk, Broken("hash order", problem))
            except NoReplica:  # no failure of the walk's
                raise _TimeIsUp from None
            return failed.get(key)

        # What Hypothesis can't shrink is shortened below, as it was.
        with contextlib.suppress(_Found, Flaky, _TimeIsUp):
            self._search(part, look)
        walk = min((found.walk for found in failed.values()), key=lambda walk: (len(walk.actions), len(frozen(walk.actions))), default=seen)
        if not self._other_outcome(replica, walk):
            return self._violation(
                walk, Broken("shared state", f"another process, in which less was played before, gave something else {problem}")
            )
        walk = simplified(walk, lambda candidate: bool(self._other_outcome(replica, candidate)), self._patience)
        history = [played for played, _ in part.played]
        return self._violation(walk, named(replica, walk, self._layers, self._other_outcome(replica, walk) or problem, history))

    def _other_outcome(self, replica: Replica, walk: Walk) -> str:
        return compare_texts(fresh_texts(self._factory, walk, self._layers.ignored), replica.texts([walk], self._layers.ignored)[0])

    def _skip_other_processes(self, why: str) -> None:
        self._replica = None
        self._skipped += [f"{invariant}: {why}" for invariant in ("hash order", "wall clock")]

    # What was found.

    def _shortened(self, found: _Found) -> TransitionViolation:
        """Leave out what Hypothesis has left in: it gives up after some hundred tries without success, or when its time is over."""
        seen: dict[int, Broken] = {}

        def breaks(walk: Walk) -> bool:
            result = self._checker.check(walk)
            if isinstance(result, Broken) and result.key == found.broken.key:
                seen[id(walk)] = result
                return True
            return False

        if not breaks(found.walk):
            return self._unsteady(found)
        walk = simplified(found.walk, breaks, self._patience, self._plain)
        return self._violation(walk, seen[id(walk)])

    def _violation(self, walk: Walk, broken: Broken, beside: Walk | None = None) -> TransitionViolation:
        if broken.invariant == "determinism":
            broken = self._refined(walk, broken)
        return told(self._factory, walk, broken, beside, invariants=self._invariants)

    def _refined(self, walk: Walk, broken: Broken) -> Broken:
        """Tell an environment that isn't deterministic from one that remembers: in processes of their own the latter gives the same."""
        if self._replica is None:
            return broken
        with contextlib.suppress(NoReplica):
            first, second = (self._replica.texts([walk], self._layers.ignored)[0] for _ in range(2))
            if first == second and self._replica.check(walk) is not None:
                problem = f"{broken.problem}; each in a process of its own gives the same, so the class or module remembers what was played"
                return Broken("shared state", problem)
        return broken

    def _unsteady(self, found: _Found) -> TransitionViolation:
        """Report what was seen once, and not when the same was played again in this process."""
        walk, broken, replica = found.walk, found.broken, self._replica
        if replica is not None and clock_alone(replica, walk, self._layers) is not None:
            # It went on in between: what shows at another time only is seen rarely here, and always there.
            walk = simplified(walk, lambda candidate: clock_alone(replica, candidate, self._layers) is not None, self._patience, self._plain)
            return self._violation(walk, clock_alone(replica, walk, self._layers) or broken)
        with contextlib.suppress(NoReplica):
            if replica is not None and replica.check(walk) is not None:
                walk = simplified(walk, lambda candidate: replica.check(candidate) is not None, self._patience, self._plain)
                invariant, problem = replica.check(walk) or (broken.invariant, broken.problem)
                return self._violation(walk, Broken(invariant, problem))
        return self._violation(walk, Broken(broken.invariant, f"{broken.problem} (seen once, and not when the same was played again)"))

    def _close_probe(self) -> None:
        with contextlib.suppress(Exception):
            self._probe.close()


def _shares(examples: int) -> list[int]:
    first, second = (int(examples * share) for share in _PARTS[:2])
    return [count for count in (first, second, examples - first - second) if count > 0]


def _hash_seed(seed: int) -> int:
    own = os.environ.get("PYTHONHASHSEED", "")
    number = seed % 2**32 or 1
    return number if str(number) != own else number % (2**32 - 1) + 1


def closing(stack: contextlib.ExitStack, replica: Replica) -> Replica:
    """Have the replica closed with the stack."""
    stack.callback(replica.close)
    return replica
