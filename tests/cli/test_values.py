"""Reading YAML, laying values over one another, and naming a wrong key."""

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from art_gym.cli.values import describe, merge, parse_assignments, read_yaml
from art_gym.errors import UsageError


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    rate: float = 1.0


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    inner: Inner = Inner()
    name: str


def problem(values) -> str:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(values)
    return describe(caught.value, Outer)


def test_a_mistyped_key_is_named_with_the_one_that_was_meant():
    assert problem({"name": "a", "inner": {"raet": 1}}) == "unknown key 'inner.raet'; did you mean 'inner.rate'?"


def test_a_key_in_the_wrong_section_is_named_with_the_right_one():
    assert problem({"name": "a", "rate": 1}) == "unknown key 'rate'; did you mean 'inner.rate'?"


def test_a_key_like_no_other_is_named_with_all_the_keys():
    assert problem({"name": "a", "zzz": 1}) == "unknown key 'zzz'; the keys at the top are: inner, name"
    assert problem({"name": "a", "inner": {"zzz": 1}}) == "unknown key 'inner.zzz'; the keys of 'inner' are: rate"


def test_a_missing_key_and_a_wrong_value_are_both_named_in_one_line():
    text = problem({"inner": {"rate": "fast"}})
    assert "missing key 'name'" in text
    assert "inner.rate is 'fast'" in text
    assert "\n" not in text


def test_a_value_where_a_section_is_expected():
    assert problem({"name": "a", "inner": 3}) == "inner is 3; it must be a section with keys of its own"


def test_merge_changes_neither_side():
    base = {"a": {"x": 1, "y": 2}}
    changes = {"a": {"y": 3}, "b": 4}
    assert merge(base, changes) == {"a": {"x": 1, "y": 3}, "b": 4}
    assert base == {"a": {"x": 1, "y": 2}}
    assert changes == {"a": {"y": 3}, "b": 4}


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("a=1", 1),
        ("a=0.5", 0.5),
        ("a=true", True),
        ("a=word", "word"),
        ("a=[1, 2]", [1, 2]),
        ('a={"k": 1}', {"k": 1}),
        ("a=x=y", "x=y"),
        ("a=", None),
    ],
)
def test_values_are_read_as_yaml(assignment, value):
    assert parse_assignments([assignment]) == {"a": value}


@pytest.mark.parametrize("assignment", ["a", "=1", ".a=1", "a..b=1", "a.=1", ""])
def test_what_is_no_assignment_is_refused_with_an_example(assignment):
    with pytest.raises(UsageError, match=r"expected KEY=VALUE, such as --set grpo\.batches=12"):
        parse_assignments([assignment])


def test_the_example_is_one_of_the_same_option():
    with pytest.raises(UsageError, match="--env 'topics': expected KEY=VALUE, such as --env people=4"):
        parse_assignments(["topics"], "--env")


def test_a_value_that_is_no_yaml_is_refused():
    with pytest.raises(UsageError, match="isn't valid YAML"):
        parse_assignments(["a=[1"])


def test_a_section_and_a_value_of_the_same_name_contradict_each_other():
    with pytest.raises(UsageError, match="'a' was already given a value"):
        parse_assignments(["a=1", "a.b=2"])


def test_an_empty_file_holds_no_values(tmp_path):
    (tmp_path / "run.yaml").write_text("# nothing\n")
    assert read_yaml(tmp_path / "run.yaml") == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"grpo:\n  batches: [1\n", "isn't valid YAML in line 3"),
        (b"- a\n- b\n", "holds a list"),
        (b"\xff\xfe\x00", "isn't UTF-8 text"),
        (b"a: \x07", "isn't valid YAML"),
    ],
)
def test_a_bad_file_is_named_with_its_problem_in_one_line(tmp_path, content, message):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        read_yaml(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        read_yaml(tmp_path / "nowhere.yaml")
    with pytest.raises(UsageError, match="Is a directory"):
        read_yaml(tmp_path)
