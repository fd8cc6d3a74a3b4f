"""The other interpreter, and what is sent to it."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys

import pytest

import art_gym
from art_gym import call
from art_gym.testing._elsewhere import named
from art_gym.testing._factory import Factory, Unshippable
from art_gym.testing._layers import Layers
from art_gym.testing._outcomes import Walk, compare_texts, copied, difference, frozen, play
from art_gym.testing._replica import NoReplica, Replica
from art_gym.testing._script import action_source
from art_gym.testing._simplify import _simpler_values, simplified

GUESS = "art_gym_envs:art_gym/GuessNumber-v0"


@pytest.fixture
def replica():
    replica = Replica(Factory(GUESS), hash_seed=7)
    yield replica
    replica.close()


def test_it_plays_what_is_played_here(replica):
    walks = [Walk(seed, {}, [call("guess", number=8), None, call("guess", number=3)]) for seed in range(3)]
    here = [[outcome.text for outcome in play(art_gym.make(GUESS), walk)] for walk in walks]
    assert replica.texts(walks, None) == here
    assert replica.texts(walks, None, other_clock=False) == here


def test_it_checks_in_a_process_where_nothing_was_played(planted):
    replica = Replica(Factory(planted.SharedOnce), hash_seed=7)
    try:
        walk = Walk(0, {}, [call("remember", word="x")])
        for _ in range(2):
            found = replica.check(walk)
            assert found is not None
            assert "The book is opened." in found[1]
        assert replica.check(Walk(0, {}, [])) is None
    finally:
        replica.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "action", "history", "invariant"),
    [
        ("FirstOptionsStay", call("look"), [Walk(1, {"unit": "pears"}, [])], "shared state"),
        ("OptionsLeak", call("look"), [Walk(1, {"unit": "pears"}, [])], "shared state"),
        ("SharedOnce", call("remember", word="x"), [], "shared state"),
        ("UtcClock", call("remember", word="x"), [Walk(1, {}, [call("stop")])], "wall clock"),
        ("HashOrder", call("stop"), [Walk(1, {}, [call("stop")])], "hash order"),
    ],
)
def test_it_tells_what_was_played_before_from_clock_and_hash_order(planted, bug, action, history, invariant):
    factory = Factory(getattr(planted, bug))
    replica = Replica(factory, hash_seed=7)
    try:
        assert named(replica, Walk(0, {}, [action]), Layers(factory()), "at step 1", history).invariant == invariant
    finally:
        replica.close()


def test_an_environment_that_cannot_be_made_there_is_no_replica(monkeypatch):
    replica = Replica(Factory("nowhere_at_all:x/Y-v0"), hash_seed=7)
    try:
        with pytest.raises(
            NoReplica, match="loading the environment failed in the other interpreter: UsageError: can't import 'nowhere_at_all'"
        ):
            replica.texts([], None)
    finally:
        replica.close()


def test_a_process_that_dies_is_no_replica(replica):
    replica.texts([], None)
    replica._process.kill()
    replica._process.wait()
    with pytest.raises(NoReplica):
        replica.texts([Walk(0, {}, [])], None)


def test_lambdas_and_local_classes_are_not_sent():
    class Local:
        pass

    for make in (lambda: None, Local):
        with pytest.raises(Unshippable, match="can't be pickled: give a class or function of a module"):
            Factory(make).shipped()


def test_an_id_that_was_registered_here_only_is_registered_there(planted):
    art_gym.register("planted_here/Counter-v0", "planted:Counter")
    replica = Replica(Factory("planted_here/Counter-v0"), hash_seed=7)
    try:
        assert '"The goal is' in replica.texts([Walk(0, {}, [])], None)[0][0]
    finally:
        replica.close()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (GUESS, repr(GUESS)),
        (functools.partial(art_gym.make, "art_gym/GuessNumber-v0", high=4), "functools.partial(make, 'art_gym/GuessNumber-v0', high=4)"),
    ],
)
def test_a_script_names_what_makes_the_environment(make, name):
    assert Factory(make).source().make == name


def test_a_module_that_was_loaded_from_a_file_is_loaded_from_it_in_a_script(tmp_path, monkeypatch):
    file = tmp_path / "alone.py"
    file.write_text("from art_gym import ToolEnv\n\nclass Alone(ToolEnv):\n    pass\n")
    spec = importlib.util.spec_from_file_location("alone", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "alone", module)
    spec.loader.exec_module(module)
    source = Factory(module.Alone).source()
    assert source.make == "alone.Alone"
    assert f"spec = importlib.util.spec_from_file_location('alone', {str(file)!r})" in source.lines


def test_a_class_is_imported_in_a_script_from_where_its_module_is_found(planted):
    source = Factory(planted.Counter).source()
    assert source.make == "Counter"
    assert source.lines[-1] == "from planted.correct import Counter"


def test_what_has_no_name_is_left_to_the_reader():
    source = Factory(lambda: None).source()
    assert "raise NotImplementedError" in source.lines[3]
    assert "<lambda> of " in source.lines[3]


# Texts of outcomes.


def test_equal_values_of_other_types_have_other_texts():
    texts = [frozen(value) for value in (1, 1.0, True, "1", None, float("nan"))]
    assert len(set(texts)) == len(texts)


def test_order_counts_in_lists_and_not_in_dictionaries_and_sets():
    assert frozen({"a": 1, "b": 2}) == frozen({"b": 2, "a": 1})
    assert frozen({"x", "y", "z"}) == frozen({"z", "y", "x"})
    assert frozen([1, 2]) != frozen([2, 1])


def test_an_object_without_a_form_is_the_same_at_another_address():
    assert frozen({"a": object()}) == frozen({"a": object()})


def test_a_value_that_holds_itself_has_a_text():
    value: list = []
    value.append(value)
    assert frozen(value)


def test_a_copy_is_another_object_down_to_the_bottom():
    value = {"a": [1, {"b": (2, [3])}]}
    again = copied(value)
    assert again == value
    assert again["a"][1]["b"][1] is not value["a"][1]["b"][1]


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (
            [[{"content": "a"}], 0.5, False, False, {}],
            [[{"content": "b"}], 0.5, False, False, {}],
            "observation[0]['content'] was 'a', and now is 'b'",
        ),
        ([[], 0.5, False, False, {}], [[], 0.25, False, False, {}], "reward was 0.5, and now is 0.25"),
        ([[], {"a": 1}], [[], {}], "info['a'] was 1, and now is not there"),
        ([[], {}], [[{}], {}], "observation was 0 long, and now is 1 long"),
        ([[], {"a": 1}], [[], {"a": 1.0}], "info['a'] was 1, and now is 1.0"),
        ([[], {}], {"raised": "KeyError: 'a'"}, "it raised KeyError: 'a'"),
    ],
)
def test_a_difference_names_the_place(one, other, said):
    assert difference(frozen(one), frozen(other)) == said


def test_plays_are_compared_step_by_step():
    reset, step = frozen([[], {}]), frozen([[], 0.0, True, False, {}])
    other = frozen([[], 1.0, True, False, {}])
    assert compare_texts([reset, step], [reset, step]) == ""
    assert compare_texts([reset, step, reset, step], [reset, step, reset, other]) == "at step 2: reward was 0.0, and now is 1.0"
    assert compare_texts([reset, step, reset], [reset, step, frozen([[], {"a": 1}])]).startswith("at the reset after step 1: info['a']")
    assert compare_texts([reset, step], [reset]) == "after step 0, where one play ended"


# Scripts.


@pytest.mark.parametrize(
    ("action", "source"),
    [
        (call("guess", number=3, text="a"), 'art_gym.call("guess", number=3, text="a")'),
        (call("guess", **{"not a name": 1}), 'art_gym.calls(("guess", {"not a name": 1}))'),
        (call("guess", text='a"b\n'), 'art_gym.call("guess", text=\'a"b\\n\')'),
        (art_gym.say("hm"), 'art_gym.say("hm")'),
        (art_gym.calls(("a", {}), ("b", {"x": [1]}), text="t"), 'art_gym.calls(("a", {}), ("b", {"x": [1]}), text="t")'),
        (
            {**call("guess"), "content": None, "tool_calls": [{"id": "x"}]},
            '{"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}',
        ),
        (None, "None"),
        (b"x", "b'x'"),
        ({"role": "assistant", "content": "\ud800"}, "art_gym.say('\\ud800')"),
    ],
    ids=str,
)
def test_an_action_is_written_as_it_is_built(action, source):
    assert action_source(action) == source
    assert eval(source, {"art_gym": art_gym}) == action


# Simplifying.


def test_what_is_superfluous_is_left_out():
    walk = Walk(0, {}, [art_gym.say("a"), art_gym.calls(("a", {}), ("bad", {}), ("b", {}), text="x"), None, art_gym.say("b")])

    def breaks(walk: Walk) -> bool:
        return any(isinstance(action, dict) and "bad" in str(action) for action in walk.actions)

    found = simplified(walk, breaks, 60)
    assert found.actions == [{**call("bad"), "tool_calls": [{**call("bad")["tool_calls"][0], "id": "call_0"}]}]


def test_what_may_go_only_after_what_comes_later_goes():
    walk = Walk(0, {}, [art_gym.say(text) for text in "abcbad"])

    def breaks(walk: Walk) -> bool:
        texts = [action["content"] for action in walk.actions]
        # An a needs a b, and a b needs a c.
        return "d" in texts and (texts.count("b") or not texts.count("a")) and (texts.count("c") or not texts.count("b"))

    assert [action["content"] for action in simplified(walk, breaks, 60).actions] == ["d"]


@pytest.mark.parametrize(("value", "simpler"), [(2, [0, 1]), (3, [0, 1, 2]), (7, [0, 1, 3, 6]), (-2, [0, 1, -1]), (1, [0]), (0, [])])
def test_no_simpler_number_is_tried_twice(value, simpler):
    assert list(_simpler_values(value)) == simpler


def test_what_needs_all_of_it_stays():
    walk = Walk(0, {}, [art_gym.say("a"), art_gym.say("b"), art_gym.say("c")])
    found = simplified(walk, lambda candidate: len(candidate.actions) == 3, 60)
    assert [action["content"] for action in found.actions] == ["", "", ""]


def test_one_plain_action_stands_for_several():
    walk = Walk(0, {}, [art_gym.say("a")] * 6)

    def breaks(walk: Walk) -> bool:
        return len(walk.actions) == 6 or call("stop") in walk.actions

    assert simplified(walk, breaks, 60, [call("go"), call("stop")]).actions == [call("stop")]


def test_arguments_become_simple():
    action = call("take", number=-20, words=["ab", "needle", "c"], other={"x": True}, ratio=2.5)

    def breaks(walk: Walk) -> bool:
        arguments = json.loads(walk.actions[0]["tool_calls"][0]["function"]["arguments"]) if walk.actions else {}
        return arguments.get("number", 0) < -3 and any("dl" in word for word in arguments.get("words", ()))

    assert simplified(Walk(0, {}, [action]), breaks, 60).actions == [call("take", number=-4, words=["dl"])]


def test_simplifying_ends_in_time():
    walk = Walk(0, {}, [art_gym.say("a")] * 5)
    assert simplified(walk, lambda candidate: True, 0) is walk


def test_layers_know_the_reward_range_of_the_outermost():
    class Scored(art_gym.ToolEnv):
        reward_range = (0.0, 1.0)

    assert Layers(Scored()).reward_range == (0.0, 1.0)
