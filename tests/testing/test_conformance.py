"""The conformance suite: each check finds what it is for, and says so in words."""

import itertools
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import gymnasium
import pytest

import art_gym
from art_gym import Scenario, ToolEnv, UsageError, tool
from art_gym.testing import _checks, conformance
from art_gym.testing.conformance import CHECKS, check, conformance_tests, registered_by

GUESS = "art_gym/GuessNumber-v0"


class Boxes(ToolEnv):
    """Correct: the coin lies in one of three boxes."""

    instructions = "Find the coin."
    max_turns = 4

    def start(self):
        self.coin = int(self.np_random.integers(3))
        return "Three boxes."

    @tool
    def open_box(self, number: int) -> str:
        """Open a box."""
        if number % 3 == self.coin:
            self.finish(reward=1.0, success=True)
            return "The coin."
        return "Nothing."


class Unseeded(Boxes):
    """The opening depends on how many episodes there were before."""

    count = itertools.count()

    def start(self):
        return f"{super().start()} This is episode {next(self.count)}."


class Reseeded(Boxes):
    """Without a seed every episode is the same."""

    def reset(self, *, seed=3, options=None):
        return super().reset(seed=seed, options=options)


class Locked(Boxes):
    """Holds what can't be pickled."""

    def start(self):
        self.door = threading.Lock()
        return super().start()


class Forgetful(ToolEnv):
    """Forgets, when it is pickled, what it has counted."""

    looks = 0
    max_turns = 4

    def start(self):
        self.looks = 0
        return "A room."

    @tool
    def look(self) -> str:
        self.looks += 1
        return f"You have looked {self.looks} times."

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "looks"}


class MixedInfo(Boxes):
    """An int in one episode's infos, a float in another's: Gymnasium cuts the fraction off."""

    def step(self, action):
        *rest, info = super().step(action)
        return *rest, {**info, "score": 0.5 if self.np_random_seed == 6 else 1}


class Wearing(Boxes):
    """What the second episode of an instance opens with, or says at its end, depends on who makes its instances."""

    def __init__(self, render_mode=None):
        super().__init__(render_mode=render_mode)
        self.number = next(self.numbers)
        self.episodes = 0

    numbers = itertools.count()

    def start(self):
        self.episodes += 1
        return f"{super().start()} {self.number if self.episodes == 2 else ''}"


class LateInfo(Boxes):
    """From the second episode on, an info depends on who makes its instances."""

    numbers = itertools.count()

    def __init__(self, render_mode=None):
        super().__init__(render_mode=render_mode)
        self.number = next(self.numbers)
        self.episodes = 0

    def reset(self, *, seed=None, options=None):
        self.episodes += 1
        observation, info = super().reset(seed=seed, options=options)
        return observation, {**info, "place": {"number": self.number if self.episodes > 1 else 0}}


class TwiceAtLast(Boxes):
    """Its 900th scenario is its 901st too, but for the order of its options."""

    def scenarios(self, split, count=None):
        if split == "test":
            for number in range(901):
                yield Scenario(f"test-{number}", min(number, 899), {"a": 1, "b": 2} if number % 2 else {"b": 2, "a": 1})


class OwnEpisode(Boxes):
    """Has a key in its infos that RecordEpisodeStatistics needs."""

    def step(self, action):
        *rest, info = super().step(action)
        return *rest, {**info, "episode": 1}


class SameSeeds(Boxes):
    """Tests on what it trains on."""

    def scenarios(self, split, count=None):
        return (Scenario(f"{split}-{seed}", seed) for seed in range(5))


class SameIds(Boxes):
    def scenarios(self, split, count=None):
        return (Scenario("the one", seed) for seed in range(5))


class UsedUp(Boxes):
    """Yields each scenario once."""

    def __init__(self, render_mode=None):
        super().__init__(render_mode=render_mode)
        self.seeds = itertools.count()

    def scenarios(self, split, count=None):
        return (Scenario(f"{split}-{seed}", seed) for seed in itertools.islice(self.seeds, 5))


class NotJson(Boxes):
    def scenarios(self, split, count=None):
        return iter([Scenario(f"{split}-0", 0, {"when": {1, 2}})])


class Fragile(Boxes):
    """Raises what the model didn't do wrong."""

    @tool
    def shake(self) -> str:
        return {}["the coin"]


class Drifting(Boxes):
    """Its texts depend on the time."""

    @tool
    def clock(self) -> str:
        return str(time.monotonic_ns())


def registered(env: type[ToolEnv]) -> str:
    env_id = f"tests/{env.__name__}-v0"
    art_gym.register(env_id, f"{__name__}:{env.__name__}")
    return env_id


@pytest.mark.parametrize("name", [name for name in CHECKS if name not in ("vector", "transitions")])
def test_a_correct_environment_passes(name):
    CHECKS[name](registered(Boxes))


@pytest.mark.parametrize(
    ("name", "env", "text"),
    [
        ("gymnasium", Unseeded, "is non-deterministic"),
        ("gymnasium", Reseeded, r"^Gymnasium's check_env warns:\nThe default seed argument in reset should be `None`"),
        (
            "pickling",
            Locked,
            r"^the environment can't be pickled after 0 steps: TypeError: cannot pickle '_thread.lock' object(?s:.*) is in: door$",
        ),
        ("pickling", Forgetful, r"^pickled after \d steps, at step \d with .*: the observation differs\n  expected .*\n  but got  "),
        (
            "vector",
            MixedInfo,
            r"^make_vec, sync, autoreset mode NEXT_STEP, .*: step 0 of environment 1 with .*: info\['score'\].*one type.*\n.*0\.5\n",
        ),
        ("vector", Wearing, r"^make_vec, sync, autoreset mode NEXT_STEP, .*, the reset after its episode's end: the observation differs"),
        (
            "vector",
            LateInfo,
            r"^make_vec, sync, autoreset mode NEXT_STEP, .*, the reset after its episode's end: info\['place'\]\['number'\], which",
        ),
        ("wrappers", OwnEpisode, r"^AssertionError"),
        ("scenarios", SameSeeds, r"^two of the first 1000 scenarios of each split have the same seed and options: \(0, \{\}\)$"),
        ("scenarios", TwiceAtLast, r"""have the same seed and options: \(899, \{"a": 1, "b": 2\}\)$"""),
        ("scenarios", SameIds, "have the same id: 'the one'$"),
        ("scenarios", UsedUp, r"^the split 'train', taken again, differs"),
        ("scenarios", NotJson, r"^the scenario 'train-0' of 'train' has no JSON form: Object of type set"),
        pytest.param("transitions", Drifting, "clock", marks=pytest.mark.slow),
        ("replay", Drifting, r"^the episode of scenario 'train-\d' plays otherwise when it is replayed: "),
        *((name, Fragile, r"KeyError: 'the coin'") for name in ("vector", "wrappers", "replay")),
    ],
)
def test_a_bug_is_found_and_told(name, env, text):
    with pytest.raises(AssertionError, match=text):
        CHECKS[name](registered(env))


@pytest.mark.parametrize("env", [Wearing, LateInfo])
@pytest.mark.parametrize("autoreset", list(gymnasium.vector.AutoresetMode), ids=lambda mode: mode.name)
def test_what_comes_after_an_episodes_end_is_compared_in_every_mode(env, autoreset):
    options = {"autoreset_mode": autoreset, "observation_mode": "same", "copy": True}
    _checks._play_vector(registered(Boxes), "sync", options)
    with pytest.raises(AssertionError, match=r"reset.* differs"):
        _checks._play_vector(registered(env), "sync", options)


@pytest.mark.parametrize("name", ["final_obs", "final_info"])
def test_the_last_observation_and_info_are_compared_where_the_same_step_resets(monkeypatch, name):
    add_info = gymnasium.vector.VectorEnv._add_info

    def other(self, infos, info, index):
        if name in info:
            info = {**info, name: () if name == "final_obs" else {**info[name], "turn": -1}}
        return add_info(self, infos, info, index)

    monkeypatch.setattr(gymnasium.vector.VectorEnv, "_add_info", other)
    options = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP, "observation_mode": "same", "copy": True}
    with pytest.raises(AssertionError, match=rf'info\["{name}"\].* differs'):
        _checks._play_vector(registered(Boxes), "sync", options)


def test_an_error_names_its_place_in_the_environment():
    with pytest.raises(AssertionError, match="KeyError: 'the coin'") as caught:
        CHECKS["wrappers"](registered(Fragile))
    number = Fragile.shake.__code__.co_firstlineno + 2
    assert str(caught.value).splitlines()[-1] == f'  {__file__}:{number}, in shake: return {{}}["the coin"]'


def test_an_entry_point_that_is_a_class_has_no_spec_in_json():
    gymnasium.register("tests/Boxes-v0", entry_point=Boxes)
    with pytest.raises(AssertionError, match=r"^the spec can't be written as JSON: .*; register it with art_gym\.register"):
        CHECKS["spec"]("tests/Boxes-v0")


def test_an_environment_that_can_not_be_made_fails_its_checks_with_the_reason():
    with pytest.raises(AssertionError, match=r"^unknown environment 'tests/Nowhere-v0'"):
        CHECKS["pickling"]("tests/Nowhere-v0")


@pytest.mark.slow
def test_every_check_has_its_result(monkeypatch):
    def broken(env_id):
        raise AssertionError("it leaks")

    monkeypatch.setattr(conformance, "CHECKS", {"spec": CHECKS["spec"], "leaks": broken})
    found = {result.check: result for result in check(registered(Boxes), examples=5, seed=1)}
    assert list(found) == ["spec", "leaks", "transitions"]
    assert (found["spec"].passed, found["spec"].problem) == (True, "")
    assert (found["leaks"].passed, found["leaks"].problem, found["leaks"].script) == (False, "it leaks", "")
    assert found["transitions"].passed
    assert found["transitions"].note.startswith("5 examples, ")


def test_what_is_skipped_is_shown_and_not_run(monkeypatch):
    def broken(env_id):
        raise AssertionError("it was run")

    monkeypatch.setattr(conformance, "CHECKS", {"spec": CHECKS["spec"], "pickling": broken})
    found = {result.check: result for result in check(registered(Locked), examples=5, seed=1, skip=["pickling", "transitions"])}
    assert {name: (result.passed, result.skipped) for name, result in found.items()} == {
        "spec": (True, False), "pickling": (False, True), "transitions": (False, True),
    }  # fmt: skip
    with pytest.raises(UsageError, match=r"there is no check 'pickle' to skip; the checks are: spec, pickling, transitions$"):
        check(registered(Locked), skip=["pickle"])


@pytest.mark.slow
def test_a_bug_of_the_transitions_comes_with_a_script():
    (result,) = [result for result in check(registered(Drifting), examples=20) if result.check == "transitions"]
    assert not result.passed
    compile(result.script, "script", "exec")
    assert "tests/Drifting-v0" in result.script


@pytest.mark.parametrize(
    ("env_id", "text"),
    [
        ("tests/Nowhere-v0", "^unknown environment 'tests/Nowhere-v0'"),
        ("no_such_package:tests/X-v0", "^can't import 'no_such_package'"),
        ("CartPole-v1", r"^CartPole-v1 is no environment of chat messages and tool calls: its action space is Discrete\(2\)"),
    ],
)
def test_what_can_not_be_checked_is_refused_at_once(env_id, text):
    with pytest.raises(UsageError, match=text):
        check(env_id)


# The environments of a package.


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write a package that can be imported; gives its name."""
    numbers = itertools.count()

    def write(registration: str, environment: str = "") -> str:
        name = f"boxes_{tmp_path.name.replace('-', '_')}_{next(numbers)}"
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(registration.replace("PACKAGE", name))
        (tmp_path / name / "env.py").write_text(environment)
        monkeypatch.syspath_prepend(tmp_path)
        return name

    return write


REGISTER = "from art_gym import register"
ENV = """
from art_gym import Scenario, ToolEnv, tool

class Door(ToolEnv):
    max_turns = 3

    @tool
    def push(self) -> str:
        self.finish(reward=1.0)
        return "It opens."
"""


def test_the_environments_of_a_package_are_those_it_registers(package):
    name = package(
        f'{REGISTER}\nregister("PACKAGE/B-v0", "PACKAGE.env:Door")\nregister("own/A-v0", "art_gym_envs:GuessNumber", high=4)\n',
        ENV,
    )
    assert registered_by(name) == [f"{name}:{name}/B-v0", f"{name}:own/A-v0"]


def test_a_package_that_was_imported_before_keeps_its_environments(package):
    name = package(f'{REGISTER}\nregister("PACKAGE/B-v0", "PACKAGE.env:Door")\nregister("own/C-v0", "PACKAGE.env:Door")\n', ENV)
    assert registered_by(name) == registered_by(name) == [f"{name}:{name}/B-v0", f"{name}:own/C-v0"]


def test_what_else_a_package_registers_is_left_out(package):
    name = package(
        "import gymnasium, art_gym_envs\n"
        'gymnasium.register("PACKAGE/Pole-v0", entry_point="gymnasium.envs.classic_control:CartPoleEnv")\n'
        'gymnasium.register("PACKAGE/Door-v0", entry_point="PACKAGE.env:Door")\n',
        ENV,
    )
    assert registered_by(name) == [f"{name}:{name}/Door-v0"]


@pytest.mark.parametrize(
    ("registration", "text"),
    [
        ("", "registers no environment; register one there: art_gym.register"),
        ("raise RuntimeError('two\\nlines')", "^can't import 'boxes_.*': RuntimeError: two lines .*__init__.py:1"),
        ("import no_such_module", r"^can't import 'boxes_.*' \(No module named 'no_such_module'\): is it installed\?"),
    ],
)
def test_a_package_without_environments_is_refused_in_one_line(package, registration, text):
    with pytest.raises(UsageError, match=text) as caught:
        registered_by(package(registration))
    assert "\n" not in str(caught.value)


HASH_ORDER = """
    def scenarios(self, split, count=None):
        names = {f"{split}-{letter}" for letter in "abcdefghijklmnop"}
        return (Scenario(name, SEEDS[name]) for name in names)

SEEDS = {f"{split}-{letter}": number * 16 + index
         for number, split in enumerate(("train", "validation", "test")) for index, letter in enumerate("abcdefghijklmnop")}
"""
THE_DAY = """
    def scenarios(self, split, count=None):
        day = datetime.now(UTC).toordinal()
        return (Scenario(f"{split}-{index}", 300 * day + 100 * ("train", "validation", "test").index(split) + index) for index in range(50))

from datetime import UTC, datetime
"""


@pytest.mark.parametrize("scenarios", [HASH_ORDER, THE_DAY], ids=["hash order", "the day"])
def test_scenarios_that_follow_hash_order_or_clock_differ_in_another_process(package, scenarios):
    name = package(f'{REGISTER}\nregister("PACKAGE/Door-v0", "PACKAGE.env:Door")\n', ENV + scenarios)
    with pytest.raises(AssertionError, match=r"^in another process, with another hash seed and another clock, the split 'train' differs"):
        CHECKS["scenarios"](f"{name}:{name}/Door-v0")


def test_the_same_scenarios_in_another_process_pass(package):
    name = package(f'{REGISTER}\nregister("PACKAGE/Door-v0", "PACKAGE.env:Door")\n', ENV)
    assert CHECKS["scenarios"](f"{name}:{name}/Door-v0") == ""


def test_what_another_process_can_not_import_is_said(monkeypatch):
    module = ModuleType("made_while_running")
    module.Boxes = Boxes
    monkeypatch.setitem(sys.modules, module.__name__, module)
    art_gym.register("tests/Made-v0", "made_while_running:Boxes")
    note = CHECKS["scenarios"]("tests/Made-v0")
    assert note == "not compared with another process: ModuleNotFoundError: No module named 'made_while_running'"


# The one-line test.


def parameters(test) -> list[str]:
    (mark,) = test.pytestmark
    return [parameter.id for parameter in mark.args[1]]


def test_one_line_makes_a_test_of_every_environment_and_check():
    test = conformance_tests("art_gym_envs")
    assert parameters(test) == [f"art_gym/{env}-v0-{name}" for env in ("GuessNumber", "Lookup") for name in CHECKS]


def test_checks_can_be_left_out():
    ids = parameters(conformance_tests("art_gym_envs", skip=["vector", "pickling"]))
    assert len(ids) == 2 * (len(CHECKS) - 2)
    assert not [id_ for id_ in ids if "vector" in id_ or "pickling" in id_]


def test_a_check_to_leave_out_must_exist():
    with pytest.raises(UsageError, match=r"^there is no check 'picking' to skip; the checks are: gymnasium, spec, pickling, "):
        conformance_tests("art_gym_envs", skip=["picking"])


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"skip": "pickling"}, r"skip must be a list of names, as \['pickling'\], not 'pickling'"),
        ({"skip": 5}, r"skip must be a list of names, as \['pickling'\], not 5"),
        ({"skip": [[]]}, r"there is no check \[\] to skip; the checks are: gymnasium"),
        ({"examples": 0}, "examples must be at least 1, not 0"),
        ({"examples": "5"}, "examples must be a whole number, not '5'"),
        ({"seed": -1}, "seed must be at least 0, not -1"),
    ],
    ids=str,
)
def test_arguments_of_another_kind_are_refused_in_one_line(wrong, text):
    with pytest.raises(UsageError, match=f"^{text}"):
        conformance_tests("art_gym_envs", **wrong)


@pytest.mark.parametrize(("wrong", "text"), [({"examples": 0}, "examples must be at least 1"), ({"seed": "x"}, "seed must be a whole number")])
def test_a_check_of_an_impossible_number_of_examples_is_refused(wrong, text):
    with pytest.raises(UsageError, match=text):
        check(GUESS, **wrong)


def test_the_seed_reaches_the_transitions():
    (mark,) = conformance_tests("art_gym_envs", examples=3, seed=7).pytestmark
    functions = {parameter.id: parameter.values[1] for parameter in mark.args[1]}
    assert functions["art_gym/Lookup-v0-transitions"].keywords == {"examples": 3, "seed": 7}


def test_without_pytest_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytest", None)
    with pytest.raises(UsageError, match="needs the package 'pytest', which isn't installed: pip install pytest"):
        conformance_tests("art_gym_envs")


def test_the_test_fails_with_the_text_of_the_check():
    test = conformance_tests("art_gym_envs")

    def broken(env_id):
        raise AssertionError(f"{env_id} leaks")

    with pytest.raises(pytest.fail.Exception, match=r"^a/B-v0 leaks$") as caught:
        test("a/B-v0", broken)
    assert not caught.value.pytrace
