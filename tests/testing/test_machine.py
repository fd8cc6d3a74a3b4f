from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from art_gym import ToolEnv, call, tool
from art_gym.errors import UsageError
from art_gym.testing import ToolEnvMachine, Transition, TransitionViolation

pytestmark = pytest.mark.slow

FEW = settings(max_examples=25, stateful_step_count=12, database=None, deadline=None, suppress_health_check=list(HealthCheck))


class Lamp(ToolEnv):
    """Switch a lamp."""

    max_turns = 6

    def start(self) -> str:
        self.on = False
        return "It is dark."

    @tool
    def switch(self) -> str:
        """Switch the lamp."""
        self.on = not self.on
        return "on" if self.on else "off"


class LampMachine(ToolEnvMachine):
    make_env = Lamp

    @rule()
    def switch(self) -> None:
        if not self.over:
            before = self.env.unwrapped.on
            self.play(call("switch"))
            assert self.env.unwrapped.on is not before

    @invariant()
    def is_known(self) -> None:
        assert self.last is None or self.env.unwrapped.on in (True, False)


def run(machine: type[ToolEnvMachine]) -> None:
    run_state_machine_as_test(machine, settings=FEW)


def test_a_correct_environment_passes():
    run(LampMachine)


def test_the_testcase_is_what_pytest_and_unittest_run():
    assert LampMachine.TestCase.__name__ == "LampMachine.TestCase" or issubclass(LampMachine.TestCase, object)


@pytest.mark.parametrize("bug", ["SharedGoal", "LostReset", "ForgetfulSnapshot", "RaisesOnGoodInput", "WrongId", "NumpyFlag", "GlobalRandom"])
def test_bugs_are_found(planted, bug):
    cls = getattr(planted, bug)

    class Machine(ToolEnvMachine):
        make_env = cls

    with pytest.raises(TransitionViolation) as caught:
        run_state_machine_as_test(Machine, settings=settings(FEW, max_examples=200, phases=[Phase.generate]))
    assert caught.value.invariant in planted.PLANTED[cls]


def test_an_authors_own_assertion_fails_as_it_is():
    class Machine(LampMachine):
        @invariant()
        def stays_dark(self) -> None:
            assert not self.env.unwrapped.has_wrapper_attr("on") or not self.env.unwrapped.on, "it is light"

    with pytest.raises(AssertionError, match="it is light"):
        run(Machine)


def test_invariants_of_transitions_hold_as_in_check_transitions():
    def stays_off(transition: Transition) -> None:
        assert not transition.env.unwrapped.on

    class Machine(ToolEnvMachine):
        make_env = Lamp
        transition_invariants = (stays_off,)

    with pytest.raises(TransitionViolation) as caught:
        run(Machine)
    assert caught.value.invariant == "stays_off"


def test_a_function_makes_the_environment_as_well():
    class Machine(ToolEnvMachine):
        def make_env() -> Any:  # type: ignore[misc]
            return Lamp()

    run(Machine)


def test_an_id_makes_it_too():
    class Machine(ToolEnvMachine):
        make_env = "art_gym_envs:art_gym/GuessNumber-v0"

    run(Machine)


def test_a_machine_without_an_environment_says_so():
    class Machine(ToolEnvMachine):
        pass

    with pytest.raises(UsageError, match=r"Machine.make_env must be set"):
        Machine()
