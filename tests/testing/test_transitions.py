from __future__ import annotations

import copy
import functools
import importlib
import pickle
import random
import re
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gymnasium
import hypothesis
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.wrappers import OrderEnforcing, RecordEpisodeStatistics, TimeLimit, TransformReward
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.stateful import run_state_machine_as_test
from openai.types.chat import ChatCompletionMessage

import art_gym
from art_gym import ToolEnv, call, calls, say, tool, wrappers
from art_gym.errors import UsageError
from art_gym.testing import ToolEnvMachine, Transition, TransitionReport, TransitionViolation, check_actions, check_transitions
from art_gym.testing._replica import Replica

pytestmark = pytest.mark.slow


class Door(ToolEnv):
    """Push until it opens."""

    instructions = "Open the door."
    max_turns = 5

    def start(self) -> str:
        self.pushes = 0
        return "The door is shut."

    @tool
    def push(self, force: int = 1) -> str:
        """Push the door."""
        self.pushes += 1
        if self.pushes == 3:
            self.finish(reward=1.0, success=True)
            return "It opens."
        return f"It moves by {force}."


class BrokenDoor(Door):
    """The third push raises."""

    @tool
    def push(self, force: int = 1) -> str:
        """Push the door."""
        self.pushes += 1
        return f"{1 // (3 - self.pushes)}"


class Mailbox(ToolEnv):
    """Scenarios with options, and only those make an episode."""

    def scenarios(self, split, count=None):
        rows = [art_gym.Scenario(f"{split}-{index}", 100 + index, {"answer": f"A{index}"}) for index in range(3)]
        return iter(rows[:count])

    def start(self) -> str:
        self.answer = self.options["answer"]
        return f"Say {self.answer}."

    @tool
    def say_it(self, text: str) -> str:
        """Say it."""
        self.finish(reward=float(text == self.answer))
        return "Thanks."


def violation_of(make: Any, **options: Any) -> TransitionViolation:
    with pytest.raises(TransitionViolation) as caught:
        check_transitions(make, **options)
    return caught.value


# What is given, and what comes back.


def test_an_environment_is_named_by_its_id():
    assert check_transitions("art_gym_envs:art_gym/GuessNumber-v0", examples=20).skipped == ()


def test_the_report_counts_what_was_played():
    report = check_transitions(Door, examples=30)
    assert report == TransitionReport(30, report.steps, ())
    assert report.steps > 30


def test_a_function_makes_the_environment():
    assert check_transitions(functools.partial(art_gym.make, "art_gym/Lookup-v0", people=2), examples=10).skipped == ()


def test_what_cannot_be_pickled_is_not_played_in_another_interpreter():
    skipped = check_transitions(lambda: Door(render_mode=None), examples=10).skipped
    assert [entry.partition(":")[0] for entry in skipped] == ["hash order", "wall clock"]
    assert "can't be pickled" in skipped[0]


@pytest.mark.parametrize("make", [Door(), 3, None], ids=["an environment", "a number", "None"])
def test_what_makes_no_environment_is_refused(make):
    with pytest.raises(UsageError, match=r"make must be an environment's id, or a class or function"):
        check_transitions(make)


def test_a_function_that_makes_something_else_is_refused():
    with pytest.raises(UsageError, match=r"must make a gymnasium.Env, not int"):
        check_transitions(lambda: 3)


def test_a_function_that_makes_one_instance_only_is_refused():
    env = Door()
    with pytest.raises(UsageError, match="made the same one twice"):
        check_transitions(lambda: env)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"examples": 0}, "examples must be at least 1, not 0"),
        ({"examples": "5"}, "examples must be a whole number, not '5'"),
        ({"examples": 2.5}, "examples must be a whole number, not 2.5"),
        ({"examples": True}, "examples must be a whole number, not True"),
        ({"settings": 5}, r"settings must be hypothesis.settings\(…\), not 5"),
        ({"seed": "x"}, "seed must be a whole number, not 'x'"),
        ({"invariants": repr}, "invariants must be a list of functions of a Transition"),
        ({"invariants": ["positive"]}, "an invariant must be a function of a Transition, not 'positive'"),
        ({"target": 3}, "target must be a function of a Transition that returns a number, not 3"),
    ],
    ids=str,
)
def test_arguments_of_another_kind_are_refused_in_one_line(wrong, text):
    with pytest.raises(UsageError, match=f"^{text}") as caught:
        check_transitions(Door, **wrong)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), None, "much"], ids=str)
def test_a_target_that_returns_no_finite_number_is_refused(score):
    def best(transition: Transition) -> Any:
        return score

    with pytest.raises(UsageError, match=f"^the target best must return a finite number, not {score!r}$"):
        check_transitions(Door, examples=20, target=best)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"actions": call("push")}, r"actions must be a list of actions, as \[art_gym.say\('hello'\)\], not {'role'"),
        ({"actions": None}, "actions must be a list of actions"),
        ({"seed": -1}, "seed must be at least 0, not -1"),
        ({"seed": None}, "seed must be a whole number, not None"),
        ({"options": 5}, "options must be a dictionary, not 5"),
        ({"invariants": 5}, "invariants must be a list"),
    ],
    ids=str,
)
def test_check_actions_refuses_arguments_of_another_kind_in_one_line(wrong, text):
    with pytest.raises(UsageError, match=f"^{text}") as caught:
        check_actions(Door, **{"actions": [], **wrong})
    assert "\n" not in str(caught.value)


def test_an_unknown_id_is_refused():
    with pytest.raises(UsageError, match="did you mean 'art_gym/GuessNumber-v0'"):
        check_transitions("art_gym/GuesNumber-v0")


def test_a_reward_range_that_is_none_is_refused():
    class Odd(Door):
        reward_range = (1.0, -1.0)

    with pytest.raises(UsageError, match=r"Odd.reward_range must be \(lowest, highest\)"):
        check_transitions(Odd)


def test_the_same_seed_plays_the_same():
    assert len({check_transitions(Door, examples=20, seed=5).steps for _ in range(2)}) == 1


def test_without_a_seed_each_call_plays_something_else(monkeypatch):
    monkeypatch.setenv("CI", "true")
    assert len({check_transitions(Door, examples=20).steps for _ in range(4)}) > 1


def test_settings_are_used_as_they_are():
    settings = hypothesis.settings(max_examples=7, database=None, deadline=None)
    assert check_transitions(Door, examples=50, settings=settings).examples == 7


def test_a_slow_environment_passes_with_settings_that_have_a_deadline(tmp_path):
    class Slow(Door):
        @tool
        def push(self, force: int = 1) -> str:
            """Push the door."""
            time.sleep(0.02)
            return "It moves."

    settings = hypothesis.settings(max_examples=5, deadline=1, suppress_health_check=[], database=DirectoryBasedExampleDatabase(tmp_path))
    assert check_transitions(Slow, settings=settings).examples == 5
    assert not list(tmp_path.iterdir())


def test_the_random_generators_are_left_as_they_were():
    random.seed(3)
    np.random.seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist()
    check_transitions(Door, examples=5)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_scenarios_with_options_are_where_episodes_start():
    seen = set()

    def note(transition: Transition) -> None:
        seen.add(transition.env.unwrapped.options["answer"])

    check_transitions(Mailbox, examples=40, invariants=[note])
    assert seen == {"A0", "A1", "A2"}


@pytest.mark.parametrize("split", ["validation", "test"])
def test_episodes_start_from_the_first_split_that_is_not_empty(split):
    class Evaluation(Mailbox):
        def scenarios(self, asked, count=None):
            return super().scenarios(asked, count if asked == split else 0)

    class Machine(ToolEnvMachine):
        make_env = Evaluation

    run_state_machine_as_test(Machine, settings=hypothesis.settings(max_examples=3, database=None, deadline=None))
    seen = set()
    check_transitions(Evaluation, examples=20, invariants=[lambda transition: seen.add(transition.env.unwrapped.options["answer"])])
    assert seen


def test_an_environment_without_a_scenario_is_refused():
    class Empty(Mailbox):
        def scenarios(self, split, count=None):
            return iter(())

    with pytest.raises(ValueError, match="yields none: an episode needs one to start from"):
        check_transitions(Empty, examples=20)


def test_what_cannot_be_snapshotted_is_told_the_way_out():
    class Locked(Door):
        def start(self) -> str:
            self.lock = threading.Lock()
            return super().start()

    class Unlocked(Locked):
        snapshot = None
        restore = None

    violation = violation_of(Locked, examples=20)
    assert violation.invariant == "snapshot"
    assert "snapshot = restore = None" in violation.problem
    assert any(entry.startswith("snapshot: Unlocked has no snapshot") for entry in check_transitions(Unlocked, examples=20).skipped)


def test_what_the_environment_says_is_tried_as_an_argument():
    rewards = set()
    check_transitions(Mailbox, examples=200, invariants=[lambda transition: rewards.add(transition.reward)])
    assert 1.0 in rewards


# Violations.


def test_a_violation_holds_the_shortest_actions():
    violation = violation_of(BrokenDoor, examples=200)
    assert violation.invariant == "exception"
    assert violation.actions == [call("push")] * 3 or sum(len(action["tool_calls"]) for action in violation.actions) == 3
    assert violation.problem.splitlines()[0].endswith("raised ZeroDivisionError: integer division or modulo by zero")
    assert "in push" in violation.problem  # the traceback, from the environment on
    assert "_outcomes.py" not in violation.problem


def test_the_text_says_everything():
    violation = TransitionViolation(
        "reward", "it is NaN", seed=3, options={"a": 1}, actions=[call("push", force=2), say("hm"), {"role": "user"}], script="print()\n"
    )
    assert str(violation) == (
        "reward: it is NaN\n\n"
        "After reset with seed 3 and options {'a': 1}, and these actions:\n"
        '  1. call("push", force=2)\n'
        '  2. say("hm")\n'
        '  3. {"role": "user"}\n\n'
        "This program shows it:\n\n"
        "    print()"
    )


def test_a_violation_survives_pickling():
    violation = TransitionViolation("reward", "it is NaN", seed=3, actions=[say("x")], script="pass")
    again = pickle.loads(pickle.dumps(violation))
    assert (str(again), again.actions, again.seed) == (str(violation), violation.actions, 3)


def test_the_script_shows_the_violation(tmp_path):
    done = _ran(violation_of(BrokenDoor, examples=200).script, tmp_path)
    assert done.returncode == 1
    assert "ZeroDivisionError: integer division or modulo by zero" in done.stderr


@pytest.mark.parametrize("bug", ["HashOrder", "WallClock", "SharedList", "ForgetfulSnapshot", "SharedOnce", "Opened", "Memo"])
def test_the_script_shows_what_needs_other_instances_or_processes(planted, bug, tmp_path):
    done = _ran(violation_of(getattr(planted, bug), examples=200).script, tmp_path)
    assert done.returncode == 1, done.stdout
    assert "TransitionViolation: " in done.stderr


def never_opens(transition: Transition) -> None:
    assert not transition.terminated, "it opened"


class Rules:
    """Rules of an author, kept in a class."""

    @staticmethod
    def never_opens(transition: Transition) -> None:
        never_opens(transition)

    @classmethod
    def of_the_class(cls, transition: Transition) -> None:
        never_opens(transition)

    def of_an_object(self, transition: Transition) -> None:
        never_opens(transition)


OWN = [never_opens, Rules.never_opens, Rules.of_the_class, functools.partial(never_opens)]


@pytest.mark.parametrize("rule", OWN, ids=["function", "static method", "class method", "partial"])
def test_the_script_checks_the_authors_own_invariant(rule, tmp_path):
    violation = violation_of(Door, examples=200, invariants=[repr, rule])
    assert f"{violation.invariant}: step" in str(violation)
    assert "repr" not in violation.script
    done = _ran(violation.script, tmp_path)
    assert done.returncode == 1
    assert f"TransitionViolation: {violation.invariant}: step {len(violation.actions)}: it opened" in done.stderr


def test_the_script_checks_a_machines_invariant(tmp_path):
    class Machine(ToolEnvMachine):
        make_env = Door
        transition_invariants = (never_opens,)

    few = hypothesis.settings(max_examples=200, database=None, deadline=None, phases=[hypothesis.Phase.generate])
    with pytest.raises(TransitionViolation) as caught:
        run_state_machine_as_test(Machine, settings=few)
    assert "never_opens" in caught.value.script
    done = _ran(caught.value.script, tmp_path)
    assert "TransitionViolation: never_opens: step" in done.stderr


@pytest.mark.parametrize(
    "rule", [lambda transition: never_opens(transition) or None, Rules().of_an_object], ids=["lambda", "method of an object"]
)
def test_where_an_invariant_has_no_name_the_script_leaves_it_to_the_reader(rule):
    script = violation_of(Door, examples=200, invariants=[rule]).script
    assert "def invariant(transition):\n    raise NotImplementedError('check the transition here, as " in script
    assert "invariants=[invariant])" in script
    compile(script, "script.py", "exec")


def test_check_actions_passes_what_is_right():
    check_actions(Door, [call("push"), None, say("x"), call("push"), call("push"), call("push")], seed=4)


def test_check_actions_names_what_is_wrong():
    with pytest.raises(TransitionViolation, match=r"^exception: step 1, with a well-formed action, raised ZeroDivisionError"):
        check_actions(BrokenDoor, [calls(("push", {}), ("push", {}), ("push", {}))])


def test_a_constructor_that_raises_now_and_then_is_a_violation():
    made = []

    def make() -> Door:
        made.append(1)
        if len(made) > 20:
            raise OSError("no more doors")
        return Door()

    assert "making the environment raised OSError: no more doors" in violation_of(make).problem


def test_a_violation_is_found_where_it_shows_only_once():
    seen: set[str] = set()

    class Once(Door):
        @tool
        def push(self, force: int = 1) -> str:
            """Push the door."""
            new = "push" not in seen
            seen.add("push")
            return "new" if new else "old"

    violation = violation_of(Once, examples=100)
    assert violation.invariant == "determinism"
    assert "seen once, and not when the same was played again" in violation.problem


calls_until_the_hour: list[int] = []
"""Of this process; in another one no hour begins."""


class Hours(Door):
    """Tells the hour, and in this process the next one begins in the middle of a walk."""

    @tool
    def push(self, force: int = 1) -> str:
        """Push the door."""
        if calls_until_the_hour:
            calls_until_the_hour[0] -= 1
        begun = bool(calls_until_the_hour) and calls_until_the_hour[0] < 0
        return f"It is {datetime.now(UTC).hour + begun}."


@pytest.mark.parametrize("calls", [1, 3, 10])
def test_a_clock_that_goes_on_during_a_walk_is_named(monkeypatch, calls):
    monkeypatch.setattr(sys.modules[__name__], "calls_until_the_hour", [calls])
    violation = violation_of(Hours, examples=20)
    assert violation.invariant == "wall clock", violation.problem
    assert len(violation.actions) == 1


# An author's own invariants, and a target.


def test_an_authors_invariant_is_reported_by_its_name():
    def never_opens(transition: Transition) -> None:
        assert not transition.terminated, "it opened"

    violation = violation_of(Door, examples=200, invariants=[never_opens])
    assert violation.invariant == "never_opens"
    assert violation.problem.startswith(f"step {len(violation.actions)}: it opened")
    assert sum(len(action["tool_calls"]) for action in violation.actions) == 3


def test_an_invariant_that_raises_something_else_is_reported_with_the_actions():
    def odd(transition: Transition) -> None:
        raise KeyError("x")

    violation = violation_of(Door, invariants=[odd])
    assert violation.problem == "step 1: the invariant itself raised KeyError: 'x'"
    assert len(violation.actions) == 1


def test_a_transition_holds_what_was_sent_and_returned():
    kept: list[Transition] = []
    check_transitions(Door, examples=30, invariants=[kept.append])
    for transition in kept:
        assert transition.observation in transition.env.observation_space
        assert transition.info["turn"] == transition.turn
        assert type(transition.reward) is float


def test_a_target_steers_towards_more():
    def best(seed: int, **options: Any) -> int:
        lengths = []

        class Long(Door):
            max_turns = None

            @tool
            def push(self, force: int = 1) -> str:
                """Push the door."""
                self.pushes += force > 0
                return "It moves."

        check_transitions(Long, examples=60, seed=seed, invariants=[lambda t: lengths.append(t.env.unwrapped.pushes)], **options)
        return max(lengths)

    seeds = range(4)  # one alone may be lucky without a target
    assert sum(best(seed, target=lambda t: t.env.unwrapped.pushes) for seed in seeds) > sum(best(seed) for seed in seeds)


def test_a_target_sees_the_environment_as_it_was_at_its_step(monkeypatch):
    class Growing(Door):
        """Its pushes grow, go with the next episode, and are deleted when it is closed."""

        def close(self) -> None:
            vars(self).pop("pushes", None)

    seen: list[float] = []
    scores: list[float] = []

    def pushes(transition: Transition) -> float:
        seen.append(transition.env.unwrapped.pushes)
        return seen[-1]

    monkeypatch.setattr(hypothesis, "target", scores.append)
    report = check_transitions(Growing, examples=30, seed=1, target=pushes)
    assert len(seen) == report.steps
    assert {1.0, 2.0, 3.0} <= set(scores) <= {0.0, 1.0, 2.0, 3.0}


def test_a_target_that_can_not_take_what_is_shrunk_does_not_hide_the_violation():
    def picky(transition: Transition) -> float:
        return float("nan") if broken else 0.0

    broken: list[int] = []

    def never_opens(transition: Transition) -> None:
        if transition.terminated:
            broken.append(1)
            raise AssertionError("it opened")

    assert violation_of(Door, examples=200, invariants=[never_opens], target=picky).invariant == "never_opens"


# What the environment keeps open.


def test_no_environment_is_left_open_where_the_search_can_not_begin():
    opened: list[int] = []

    class Odd(Door):
        reward_range = (1.0, -1.0)

        def __init__(self) -> None:
            super().__init__()
            opened.append(1)

        def close(self) -> None:
            opened.pop()

    for call_ in (lambda: check_transitions(Odd), lambda: check_actions(Odd, [])):
        with pytest.raises(UsageError, match="reward_range"):
            call_()
        assert opened == []


def test_the_first_environment_is_closed_where_the_second_can_not_be_made():
    made: list[Any] = []
    closed: list[Any] = []

    class Single(Door):
        def __init__(self) -> None:
            if made:
                raise OSError("one is enough")
            super().__init__()
            made.append(self)

        def close(self) -> None:
            closed.append(self)

    with pytest.raises(OSError, match="one is enough"):
        check_transitions(Single)
    assert closed == made


# Infos.


def _with_info(value: Any) -> type[Door]:
    class Told(Door):
        def step(self, action: Any) -> Any:
            *rest, info = super().step(action)
            return *rest, {**info, "told": value}

    return Told


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, r"^info: info\['told'\] of step 1 is None"),
        ([1, None], r"^info: info\['told'\]\[1\] of step 1 is None"),
        ([{"a": [{"b": None}]}], r"^info: info\['told'\]\[0\]\['a'\]\[0\]\['b'\] of step 1 is None"),
        (2**63, r"^info: info\['told'\] of step 1 is 9223372036854775808, a whole number of more than 64 bits: give it as text"),
        ({"a": -(2**63) - 1}, r"^info: info\['told'\]\['a'\] of step 1 is -9223372036854775809, a whole number"),
    ],
    ids=str,
)
def test_what_vector_environments_can_not_take_is_a_violation(value, text):
    with pytest.raises(TransitionViolation, match=text):
        check_actions(_with_info(value), [call("push")])


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63), [1, "a", [0.5]], {"a": {"b": []}}, [], True], ids=str)
def test_what_they_can_take_is_none(value):
    check_actions(_with_info(value), [call("push")])


class Mixed(Door):
    """The type of an info follows from the seed."""

    def step(self, action: Any) -> Any:
        *rest, info = super().step(action)
        return *rest, {**info, "parts": {"score": 1 if self.np_random_seed % 2 else 0.5}}


def test_the_script_shows_that_infos_of_two_episodes_have_other_types(tmp_path):
    violation = violation_of(Mixed, examples=60)
    assert violation.invariant == "info types"
    done = _ran(violation.script, tmp_path)
    assert done.returncode == 1
    assert "AssertionError: info['parts']['score'] is of type " in done.stderr
    # With one seed for both there is nothing to show.
    one, other = re.search(r"played\(actions, seed=(\d+)\), played\(others, seed=(\d+)\)", violation.script).groups()
    assert _ran(violation.script.replace(f"others, seed={other})", f"others, seed={one})"), tmp_path).returncode == 0


def _ran(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    return subprocess.run([sys.executable, folder / "script.py"], capture_output=True, text=True, cwd=folder, check=False)


# Ids.


def test_the_script_makes_what_was_registered_here_only(tmp_path):
    art_gym.register("tests/BrokenDoor-v0", f"{__name__}:BrokenDoor")
    done = _ran(violation_of("tests/BrokenDoor-v0", examples=200).script, tmp_path)
    assert "ZeroDivisionError: integer division or modulo by zero" in done.stderr


def test_the_script_makes_what_an_import_registered(tmp_path, monkeypatch):
    (tmp_path / "its_tasks").mkdir()
    (tmp_path / "its_tasks" / "__init__.py").write_text(
        "from art_gym import register\nregister('its_tasks/Count-v0', 'its_tasks.env:Count', start=3)\n"
    )
    (tmp_path / "its_tasks" / "env.py").write_text(
        "from art_gym import ToolEnv, tool\n\n\n"
        "class Count(ToolEnv):\n"
        "    def __init__(self, start=0, render_mode=None):\n"
        "        super().__init__(render_mode=render_mode)\n"
        "        self.first = start\n\n"
        "    @tool\n"
        "    def look(self) -> str:\n"
        "        return str(1 // (self.first - 3))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("its_tasks")
    (tmp_path / "elsewhere").mkdir()
    for env_id in ("its_tasks/Count-v0", "its_tasks:its_tasks/Count-v0"):
        done = _ran(violation_of(env_id, examples=50).script, tmp_path / "elsewhere")
        assert "ZeroDivisionError" in done.stderr


def test_the_script_makes_what_a_script_registered(tmp_path):
    (tmp_path / "own.py").write_text(
        "import art_gym\n"
        "from art_gym.testing import TransitionViolation, check_transitions\n\n\n"
        "class Own(art_gym.ToolEnv):\n"
        "    @art_gym.tool\n"
        "    def look(self) -> str:\n"
        "        return str(1 // 0)\n\n\n"
        "art_gym.register('own/Own-v0', '__main__:Own')\n"
        "if __name__ == '__main__':\n"
        "    try:\n"
        "        check_transitions('own/Own-v0', examples=20)\n"
        "    except TransitionViolation as violation:\n"
        "        print(violation.script)\n"
    )
    done = subprocess.run([sys.executable, tmp_path / "own.py"], capture_output=True, text=True, cwd=tmp_path, check=False)
    (tmp_path / "elsewhere").mkdir()
    assert "ZeroDivisionError" in _ran(done.stdout, tmp_path / "elsewhere").stderr


def test_the_script_makes_a_class_that_was_registered_with_gymnasium(tmp_path):
    gymnasium.register("tests/BrokenClass-v0", entry_point=BrokenDoor)
    script = violation_of("tests/BrokenClass-v0", examples=200).script
    assert re.search(r"^gymnasium\.register\('tests/BrokenClass-v0', entry_point=(\w+\.)?BrokenDoor\)$", script, re.MULTILINE)
    assert "ZeroDivisionError: integer division or modulo by zero" in _ran(script, tmp_path).stderr


# The other interpreter.


@pytest.mark.parametrize("answers", [1, 2, 3])
def test_a_difference_is_reported_where_the_other_interpreter_ends_after_it_was_seen(monkeypatch, planted, answers):
    texts = Replica.texts
    asked: list[int] = []

    def dying(self: Replica, walks: Any, ignored: Any, **options: Any) -> Any:
        asked.append(1)
        if len(asked) > answers:
            self._process.kill()
            self._process.wait()
        return texts(self, walks, ignored, **options)

    monkeypatch.setattr(Replica, "texts", dying)
    violation = violation_of(planted.HashOrder, examples=60, seed=1)
    assert violation.invariant == "hash order"
    assert len(asked) > answers


# Wrapped environments.


@pytest.mark.parametrize(
    ("wrap", "skipped"),
    [
        (lambda: OrderEnforcing(Door()), set()),
        (lambda: gymnasium.make("art_gym_envs:art_gym/GuessNumber-v0"), set()),
        (lambda: TimeLimit(Door(), 2), {"snapshot", "after the end", "flags: never both"}),
        (lambda: RecordEpisodeStatistics(Door()), {"snapshot"}),
        (lambda: TransformReward(Door(), lambda reward: 2 * reward), {"snapshot", "reward range", "reward components"}),
    ],
    ids=["OrderEnforcing", "gymnasium.make", "TimeLimit", "RecordEpisodeStatistics", "TransformReward"],
)
def test_gymnasiums_wrappers_are_no_violation(wrap, skipped):
    report = check_transitions(wrap, examples=40)
    assert {
        entry.partition(": the wrapper")[0].partition(": TimeLimit")[0].partition(": Record")[0].partition(": Trans")[0]
        for entry in report.skipped
    } == {
        *skipped,
        *(entry for entry in report.skipped if entry.startswith(("hash order", "wall clock"))),
    }


@pytest.mark.parametrize(
    "wrap",
    [
        lambda: wrappers.Transcript(Door()),
        lambda: wrappers.AddReward(Door(), "length", lambda step: 0.1 * len(step.observation)),
        lambda: wrappers.TurnLimit(Door(), 2),
        lambda: wrappers.TokenLimit(Door(), 60),
        lambda: wrappers.SelectTools(Mailbox(), []),
        lambda: wrappers.Redact(Door(), "moves"),
        lambda: wrappers.Transcript(wrappers.TurnLimit(wrappers.AddReward(Door(), "one", lambda step: 1.0), 3)),
        lambda: wrappers.Transcript(TimeLimit(Door(), 2)),
    ],
    ids=["Transcript", "AddReward", "TurnLimit", "TokenLimit", "SelectTools", "Redact", "several", "around Gymnasium's"],
)
def test_this_packages_wrappers_are_no_violation(wrap):
    skipped = [entry.partition(":")[0] for entry in check_transitions(wrap, examples=40).skipped]
    assert "snapshot" not in skipped


@pytest.mark.parametrize("tries", [1, 2])
def test_a_step_that_is_accepted_at_a_later_try_only_is_found(tries):
    class Patient(Door):
        refused = 0

        def step(self, action: Any) -> Any:
            try:
                return super().step(action)
            except ResetNeeded:
                self.refused += 1
                if self.refused <= tries or not self.turn:
                    raise
                return (), 0.0, True, False, {}

    violation = violation_of(Patient, examples=50)
    assert violation.invariant == "after the end"
    assert violation.problem.startswith(f"step after the episode's end, tried for time {tries + 1}, was accepted")


def test_a_step_before_the_reset_that_is_accepted_at_the_second_try_is_found():
    class Patient(Door):
        refused = 0

        def step(self, action: Any) -> Any:
            try:
                return super().step(action)
            except ResetNeeded:
                self.refused += 1
                if self.refused == 1 or self.turn:
                    raise
                return (), 0.0, True, False, {}

    assert violation_of(Patient, examples=50).invariant == "before reset"


@pytest.mark.parametrize("ids", [["\ud800"], ["\ud800", "?"], ["a", "\ud800", "\ud800"], ["call_0\udfff", None]], ids=ascii)
def test_ids_that_no_text_carries_are_answered_with_ids_of_their_own(ids):
    written = [{"id": id_, "type": "function", "function": {"name": "push", "arguments": "{}"}} for id_ in ids]
    check_actions(Door, [{"role": "assistant", "content": None, "tool_calls": written}])


def test_an_action_may_be_a_message_object():
    message = ChatCompletionMessage.model_validate(call("push"))
    check_actions(Door, [message, message])


def test_a_wrapper_that_breaks_something_is_found():
    class Loses(gymnasium.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            observation, *rest = self.env.step(action)
            return observation[:-1], *rest

    assert violation_of(lambda: Loses(Door()), examples=50).invariant == "answers"


def test_another_kind_of_environment_is_checked_as_far_as_it_goes():
    report = check_transitions(functools.partial(gymnasium.make, "CartPole-v1"), examples=20)
    assert any(entry.startswith("answers: ") for entry in report.skipped)
    assert report.steps > 20


def test_the_walks_go_on_after_an_episodes_end():
    turns = []
    check_transitions(Door, examples=60, invariants=[lambda transition: turns.append(transition.turn)])
    assert max(turns) <= 5


def test_two_instances_with_different_tools_are_a_violation():
    numbers = iter(range(1000))

    class Odd(Door):
        def __init__(self) -> None:
            super().__init__()
            self.constrain("push", force=float if next(numbers) == 2 else int)

    assert violation_of(Odd).problem == "two instances have different action spaces"


def test_a_space_whose_samples_lie_outside_is_a_violation():
    class Bad(art_gym.ToolCallSpace):
        def contains(self, x: Any) -> bool:
            return False

    class Odd(Door):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = Bad(self.action_space.tools)

    assert violation_of(Odd).invariant == "action space"


def test_the_file_of_a_script_that_defines_the_environment_is_loaded_elsewhere_by_its_path(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(
        "from art_gym import ToolEnv, tool\n"
        "from art_gym.testing import check_transitions\n"
        "class Own(ToolEnv):\n"
        "    @tool\n"
        "    def words(self) -> str:\n"
        "        return ' '.join({'one', 'two', 'three', 'four', 'five', 'six', 'seven'})\n"
        "if __name__ == '__main__':\n"
        "    check_transitions(Own, examples=20)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "TransitionViolation: hash order: " in done.stderr


def test_a_script_without_a_guard_is_not_run_again_and_again(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(
        "from art_gym import ToolEnv\n"
        "from art_gym.testing import check_transitions\n"
        "class Own(ToolEnv):\n"
        "    pass\n"
        "print(check_transitions(Own, examples=5).skipped)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "put them under if __name__ == '__main__'" in done.stdout


def test_no_other_interpreter_is_left_behind():
    before = _children()
    check_transitions(Door, examples=5)
    assert _children() == before


def _children() -> set[str]:
    return {path.read_text() for path in Path("/proc/self/task").glob("*/children")}


def test_actions_are_not_changed_by_the_check():
    actions = [call("push"), {"role": "assistant", "tool_calls": [{}]}]
    before = copy.deepcopy(actions)
    check_actions(Door, actions)
    assert actions == before
