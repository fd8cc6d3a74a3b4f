from __future__ import annotations

import unittest
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from art_gym import Scenario, ToolEnv, call, say, tool
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

    @precondition(lambda self: not self.over)
    @rule()
    def switch(self) -> None:
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
    class Dark(LampMachine):
        @invariant()
        def stays_dark(self) -> None:
            assert self.last is None or not self.env.unwrapped.on, "it is light"

    for machine, failures in ((LampMachine, 0), (Dark, 1)):
        machine.TestCase.settings = FEW
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(machine.TestCase).run(result)
        assert result.testsRun == 1
        assert [text for _, text in result.errors] == []
        assert len(result.failures) == failures
        assert all("it is light" in text for _, text in result.failures)


def test_a_rule_that_plays_after_the_end_is_told_the_precondition():
    class Machine(LampMachine):
        @rule()
        def careless(self) -> None:
            self.play(call("switch"))

    with pytest.raises(UsageError, match=r"^the episode is over: put the rule under @precondition\(lambda self: not self\.over\)"):
        run_state_machine_as_test(Machine, settings=settings(FEW, phases=[Phase.generate]))


class Fragile(Lamp):
    """Raises when it is spoken to in another way than it expects."""

    def step(self, action: Any) -> Any:
        if not isinstance(action, dict) or "broken" in str(action):
            raise ValueError("what was that?")
        return super().step(action)


@pytest.mark.parametrize(("action", "word"), [(3, "a broken"), (say("broken"), "a well-formed")])
def test_a_broken_action_is_called_one(action, word):
    class Machine(ToolEnvMachine):
        make_env = Fragile

    machine = Machine()
    machine._reset(Scenario("one", 1))
    with pytest.raises(TransitionViolation, match=f"^exception: step 1, with {word} action, raised ValueError"):
        machine.play(action)
    machine.env.close()


def test_an_authors_failure_is_not_replaced_by_that_of_the_whole_episode():
    counted: list[int] = []

    class Forgetful(Lamp):
        def snapshot(self) -> Any:  # shows in the check of the whole episode only
            raise OSError("no snapshot")

    class Machine(ToolEnvMachine):
        make_env = Forgetful

        @precondition(lambda self: not self.over)
        @rule()
        def fail(self) -> None:
            counted.append(1)
            self.play(call("switch"))
            raise RuntimeError("the author's own")

        def act(self) -> None: ...
        def act_as_models_do(self) -> None: ...
        def start_again(self) -> None: ...

    with pytest.raises(RuntimeError, match="the author's own"):
        run(Machine)
    assert counted


def test_the_last_episode_of_a_run_is_checked_as_a_whole_inside_an_except_clause_too():
    class Forgetful(Lamp):
        def snapshot(self) -> Any:
            raise OSError("no snapshot")

    class Machine(ToolEnvMachine):
        make_env = Forgetful

        @rule()
        def start_again(self) -> None: ...  # so that nothing but the run's end checks the episode

    try:
        raise KeyError("around it all")
    except KeyError:
        with pytest.raises(TransitionViolation, match="no snapshot"):
            run_state_machine_as_test(Machine, settings=settings(FEW, phases=[Phase.generate]))


@pytest.mark.parametrize(
    "wrong", [{"reward_range": (1, -1)}, {"scenarios": lambda self, split, count=None: iter(())}], ids=["reward_range", "scenarios"]
)
def test_a_machine_that_can_not_begin_leaves_no_environment_open(wrong):
    closed: list[bool] = []
    cls = type("Odd", (Lamp,), {**wrong, "close": lambda self: closed.append(True)})

    class Machine(ToolEnvMachine):
        make_env = cls

    with pytest.raises((UsageError, ValueError), match=r"reward_range|yields none"):
        Machine()
    assert closed == [True]


def test_a_function_that_makes_no_environment_is_refused():
    class Machine(ToolEnvMachine):
        make_env = dict

    with pytest.raises(UsageError, match=r"^dict must make a gymnasium\.Env, not dict$"):
        Machine()


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
