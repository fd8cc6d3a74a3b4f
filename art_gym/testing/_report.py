"""What `check_transitions` reports: that nothing was found, or what was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from art_gym.testing._factory import Factory
from art_gym.testing._outcomes import Walk
from art_gym.testing._script import action_source, script
from art_gym.testing._watch import Broken, Invariant, name_of


class TransitionViolation(AssertionError):
    """An environment breaks its contract; the text tells how, and holds a script that shows it.

    Attributes:
        invariant: Short name of what doesn't hold, or the name of the author's own invariant.
        problem: What was seen.
        seed: The seed of the episode.
        options: Its options.
        actions: What was done, the shortest list that was found; after an episode's end they go on in the next, after `reset()` without a seed.
        script: A Python program that plays it again.
    """

    def __init__(
        self,
        invariant: str,
        problem: str,
        *,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
        actions: Sequence[Any] = (),
        script: str = "",
    ) -> None:
        self.invariant = invariant
        self.problem = problem
        self.seed = seed
        self.options = dict(options or {})
        self.actions = list(actions)
        self.script = script
        super().__init__(self._text())

    def _text(self) -> str:
        options = f" and options {self.options}" if self.options else ""
        done = [f"  {index}. {action_source(action, prefix='')}" for index, action in enumerate(self.actions, start=1)]
        how = [f"After reset with seed {self.seed}{options}" + (", and these actions:" if done else "."), *done]
        shown = ["", "This program shows it:", "", *(f"    {line}" if line else "" for line in self.script.splitlines())] if self.script else []
        return "\n".join([f"{self.invariant}: {self.problem}", "", *how, *shown])

    def __reduce__(self) -> tuple[Any, ...]:
        return _violation, (self.invariant, self.problem, self.seed, self.options, self.actions, self.script)


def _violation(invariant: str, problem: str, seed: int, options: dict[str, Any], actions: list[Any], script: str) -> TransitionViolation:
    return TransitionViolation(invariant, problem, seed=seed, options=options, actions=actions, script=script)


@dataclass(frozen=True, slots=True)
class TransitionReport:
    """What was checked, where nothing was found.

    Attributes:
        examples: Lists of actions that were played.
        steps: Steps that these came to, each counted once however often it was played.
        skipped: "invariant: why" for each that could not be checked.
    """

    examples: int
    steps: int
    skipped: tuple[str, ...] = ()


def told(
    factory: Factory, walk: Walk, broken: Broken, beside: Walk | None = None, *, invariants: Sequence[Invariant] = ()
) -> TransitionViolation:
    """Tell what is broken, with the script that shows it.

    Args:
        factory: Makes the environment.
        walk: What was played.
        broken: What is broken.
        beside: A second walk, whose infos have entries of other types.
        invariants: The author's own ones, of which the script checks those of that name.
    """
    return TransitionViolation(
        broken.invariant,
        broken.problem,
        seed=walk.seed,
        options=walk.options,
        actions=walk.actions,
        script=script(
            factory,
            walk,
            f"{broken.invariant}: {broken.problem}",
            beside,
            invariants=[invariant for invariant in invariants if name_of(invariant) == broken.invariant],
        ),
    )
