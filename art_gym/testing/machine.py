"""A state machine for authors who want to steer the episodes of their own property tests."""

from __future__ import annotations

import contextlib
import inspect
import sys
from typing import Any, ClassVar

import gymnasium
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from hypothesis.strategies import SearchStrategy

from art_gym.errors import UsageError
from art_gym.scenarios import Scenario
from art_gym.testing._arguments import checked_invariants
from art_gym.testing._factory import Factory, Make
from art_gym.testing._layers import Layers
from art_gym.testing._outcomes import Outcome, Walk, compare_texts
from art_gym.testing._report import TransitionViolation, told
from art_gym.testing._walk import WalkChecker, contains, kept_generators
from art_gym.testing._watch import Broken, Invariant, Transition, Watch
from art_gym.testing.strategies import actions, broken_actions, scenarios, starting_split


class ToolEnvMachine(RuleBasedStateMachine):
    """A state machine that plays an environment, checks every transition, and takes an author's own rules and invariants.

    It resets to scenarios and takes well-formed and broken actions. Each step is checked at once; each episode as a whole, against other
    instances and from snapshots, when it is reset or the run ends. All of that happens in this process: hash order and wall clock are
    checked by `check_transitions` alone, as are the spaces' samples. An author's `@rule` acts by `self.play(action)` where the episode isn't
    over; an `@invariant` looks at `self.env`.

    >>> from art_gym import ToolEnv, call, tool
    >>> class Door(ToolEnv):
    ...     open = False
    ...     def start(self) -> None:
    ...         self.open = False
    ...     @tool
    ...     def push(self) -> str:
    ...         self.open = True
    ...         return "It opens."
    >>> class DoorMachine(ToolEnvMachine):
    ...     make_env = Door
    ...     @precondition(lambda self: not self.over)
    ...     @rule()
    ...     def push(self) -> None:
    ...         self.play(call("push"))
    ...         assert self.env.open
    >>> TestDoor = DoorMachine.TestCase  # unittest and pytest run it

    Attributes:
        make_env: The environment's id, or a class or function that makes it.
        transition_invariants: Called with every `Transition`, as in `check_transitions`.
        env: The environment that is played.
        walk: Where the episode started, and its actions so far.
        over: Whether the episode has ended.
    """

    make_env: ClassVar[Make]
    transition_invariants: ClassVar[tuple[Invariant, ...]] = ()
    _made: ClassVar[Any] = None

    def __init__(self) -> None:
        """Make the environment.

        Raises:
            UsageError: `make_env` isn't set, or makes no environment; or `transition_invariants` are no functions.
            ValueError: The environment's scenarios yield none, in any split.
        """
        super().__init__()
        self._around = sys.exc_info()[1]  # what is being handled around the run, if anything
        make = inspect.getattr_static(type(self), "make_env", None)
        if make is None:
            raise UsageError(f"{type(self).__name__}.make_env must be set: an environment's id, or a class or function that makes it")
        # A function in a class would else become a method.
        self._factory = Factory(make.__func__ if isinstance(make, staticmethod) else make)
        self._invariants = checked_invariants(self.transition_invariants)
        with contextlib.ExitStack() as stack:
            self.env: gymnasium.Env[Any, Any] = self._factory()
            stack.callback(self.env.close)
            self._layers = Layers(self.env)
            self._actions, self._broken_actions, self._scenarios = self._strategies()
            stack.pop_all()
        self._checker = WalkChecker(self._factory, self._layers)
        self._watch = Watch(self.env, self._layers, self._invariants)
        self._texts: list[str] = []
        self.walk = Walk(0, {}, [])
        self.over = True

    @property
    def last(self) -> Transition | None:
        """The last `Transition` since the environment was reset to a scenario; None before the first."""
        return self._watch.transitions[-1] if self._watch.transitions else None

    def play(self, action: Any) -> Outcome:
        """Take a step with the action and check it.

        Raises:
            TransitionViolation: The contract is broken.
            UsageError: The episode is over.
        """
        if self.over:
            raise UsageError("the episode is over: put the rule under @precondition(lambda self: not self.over)")
        self.walk = Walk(self.walk.seed, self.walk.options, [*self.walk.actions, action])
        try:
            outcome = self._watch.step(action, broken=not contains(self.env.action_space, action))
        except Broken as broken:
            self._texts = []  # this episode has been judged
            raise self._told(broken) from None
        self.over = outcome.over
        self._texts.append(outcome.text)
        return outcome

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        """Reset the environment for the first time."""
        self._reset(data.draw(self._scenarios, label="scenario"))

    @precondition(lambda self: not self.over)
    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        """Take a well-formed action."""
        self.play(data.draw(self._actions, label="action"))

    @precondition(lambda self: not self.over)
    @rule(data=st.data())
    def act_as_models_do(self, data: st.DataObject) -> None:
        """Take a broken action, or a well-formed one where the space knows none that is broken."""
        self.play(data.draw(self._broken_actions, label="broken action"))

    @precondition(lambda self: bool(self.walk.actions))
    @rule(data=st.data())
    def start_again(self, data: st.DataObject) -> None:
        """Check the episode so far as a whole, and reset to another scenario."""
        self._check_episode()
        self._reset(data.draw(self._scenarios, label="scenario"))

    def teardown(self) -> None:
        """Check the last episode as a whole, unless the run has failed already, and close the environment."""
        try:
            # Hypothesis calls this while the run's failure is on its way; another one would take its place.
            if sys.exc_info()[1] is self._around:
                self._check_episode()
        finally:
            self.env.close()

    def _strategies(self) -> tuple[SearchStrategy[Any], SearchStrategy[Any], SearchStrategy[Scenario]]:
        """Return what is drawn from: made once for a class, as Hypothesis makes a machine for every run."""
        space = self.env.action_space
        made = vars(type(self)).get("_made")
        if made is None or made[0] != space:
            good, broken = actions(space), broken_actions(space)
            made = space, (good, good if broken.is_empty else broken, scenarios(self.env, starting_split(self.env)))
            type(self)._made = made
        strategies: tuple[SearchStrategy[Any], SearchStrategy[Any], SearchStrategy[Scenario]] = made[1]
        return strategies

    def _reset(self, scenario: Scenario) -> None:
        self.walk = Walk(scenario.seed, dict(scenario.options), [])
        try:
            outcome = self._watch.reset(self.walk)
        except Broken as broken:
            raise self._told(broken) from None
        self._texts = [outcome.text]
        self.over = False

    def _check_episode(self) -> None:
        if not self._texts:
            return
        texts, self._texts = self._texts, []
        try:
            self._watch.check_returned()
        except Broken as broken:
            raise self._told(broken) from None
        with kept_generators():
            result = self._checker.check(self.walk)
        if isinstance(result, Broken):
            raise self._told(result)
        if problem := compare_texts(result.texts, texts):
            raise self._told(Broken("reset", f"after other episodes in the same instance, this one gave something else {problem}"))

    def _told(self, broken: Broken) -> TransitionViolation:
        return told(self._factory, self.walk, broken, invariants=self._invariants)
