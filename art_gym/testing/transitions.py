"""Property tests of an environment's transitions.

`check_transitions` plays lists of well-formed and broken actions and checks that nothing breaks the contract. What is checked on each list is
in `art_gym.testing._walk`, how a list that breaks something is found and made small in `art_gym.testing._search`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity

from art_gym.errors import UsageError
from art_gym.testing._arguments import (
    checked_actions,
    checked_examples,
    checked_invariants,
    checked_options,
    checked_seed,
    checked_settings,
    checked_target,
)
from art_gym.testing._elsewhere import named
from art_gym.testing._factory import Factory, Make
from art_gym.testing._layers import Layers
from art_gym.testing._outcomes import Walk, compare_texts
from art_gym.testing._replica import NoReplica, Replica, is_replica
from art_gym.testing._report import TransitionReport, TransitionViolation, told
from art_gym.testing._search import Search, closing
from art_gym.testing._walk import WalkChecker
from art_gym.testing._watch import Broken, Invariant, Target, Transition

__all__ = ["Invariant", "Make", "Target", "Transition", "TransitionReport", "TransitionViolation", "check_actions", "check_transitions"]


def check_transitions(
    make: Make,
    *,
    examples: int = 100,
    invariants: Sequence[Invariant] = (),
    target: Target | None = None,
    settings: hypothesis.settings | None = None,
    seed: int | None = None,
) -> TransitionReport:
    """Play lists of well-formed and broken actions, and check that every transition keeps the contract.

    Each list is played many times: alone under watch, by another instance beside a third one, by one that has played before, by one that
    resets to the seed again and again, from snapshots; and all lists once more in an interpreter with another hash seed and another clock.
    Checked are: determinism under equal seed and actions; that instances share no state, and a reset leaves nothing behind; that snapshots
    are exact; that the process's random generators stay untouched; that observations are in their space and never change or alias anything
    later, not even the caller's changes; that rewards are finite, in `reward_range` and add up; that flags are bools and exclude each
    other; that infos are JSON with one type a key; that every call is answered once, in order, with its id; that nothing a model writes
    raises; that a step before the reset or after the end raises `ResetNeeded`; that rendering changes nothing and closing twice is
    harmless.

    >>> report = check_transitions("art_gym_envs:art_gym/GuessNumber-v0", examples=5)
    >>> report.examples, report.skipped
    (5, ())

    Args:
        make: The environment's id ("package:namespace/Name-v0", or one that is registered), or a class or function that makes it. One that
            can't be pickled, as a lambda, can't be played in another interpreter: hash order and wall clock then go unchecked, as the
            report says.
        examples: Lists of actions at most.
        invariants: Called with every `Transition`; an AssertionError says that something doesn't hold.
        target: Called with every `Transition`, returns a finite number: Hypothesis looks for lists of actions that make its largest larger.
        settings: Hypothesis's settings, instead of those built here, which have all phases but `explain`. Their `max_examples` counts then,
            and not `examples`. Whatever they say, there is no deadline, no health check and no database: an example takes as long as the
            environment does, and what is found comes with a script.
        seed: Makes the lists the same every time; None draws new ones at every call, under CI too.

    Raises:
        TransitionViolation: The contract is broken; the text holds the shortest actions found and a script.
        UsageError: What is given makes no environment, or another argument isn't what it must be.
        ValueError: The environment's scenarios yield none, in any split.
        Exception: Whatever the environment's constructor raises the first time; later it is a violation.
    """
    _refuse_replica()
    built = _settings(checked_examples(examples))
    factory = Factory(make)
    settings = hypothesis.settings(checked_settings(settings) or built, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    seed = random.SystemRandom().randrange(2**32) if seed is None else checked_seed(seed)
    with Search(factory, checked_invariants(invariants), checked_target(target), settings, seed) as search:
        return search.run()


def check_actions(
    make: Make, actions: Sequence[Any], *, seed: int = 0, options: Mapping[str, Any] | None = None, invariants: Sequence[Invariant] = ()
) -> None:
    """Check every invariant on one list of actions, as `check_transitions` does on many: what its scripts call.

    Args:
        make: As for `check_transitions`.
        actions: The actions; after an episode's end they go on in the next, which `reset()` without a seed starts.
        seed: Seed of the episode.
        options: Options of the episode.
        invariants: As for `check_transitions`.

    Raises:
        TransitionViolation: The contract is broken.
        UsageError: What is given makes no environment, or another argument isn't what it must be.
        Exception: Whatever the environment's constructor raises the first time; later it is a violation.
    """
    _refuse_replica()
    factory = Factory(make)
    invariants = checked_invariants(invariants)
    walk = Walk(checked_seed(seed), checked_options(options), checked_actions(actions))
    with contextlib.closing(factory.probe()) as probe:
        layers = Layers(probe)
    found = WalkChecker(factory, layers, invariants).check(walk)
    if isinstance(found, Broken):
        raise told(factory, walk, found, invariants=invariants)
    with contextlib.suppress(NoReplica), contextlib.ExitStack() as stack:
        # Sets of few words are in the same order for some pairs of hash seeds.
        for replica in [closing(stack, Replica(factory, hash_seed=number)) for number in (1, 2, 3)]:
            texts = replica.texts([walk], layers.ignored)[0]
            if problem := compare_texts(found.texts, texts):
                raise told(factory, walk, named(replica, walk, layers, problem))


def _settings(examples: int) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=examples,
        derandomize=False,
        verbosity=Verbosity.quiet,
        print_blob=False,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.target, Phase.shrink],
    )


def _refuse_replica() -> None:
    if is_replica():
        raise UsageError("the checks were started while another interpreter loads this module: put them under if __name__ == '__main__':")
