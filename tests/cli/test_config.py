"""A run's configuration: validation, files, recipes."""

from importlib import resources

import pytest
import yaml

from art_gym.cli.config import RunConfig, Section, recipe
from art_gym.errors import UsageError


def config(**sections) -> RunConfig:
    return RunConfig.from_values({"env": {"id": "art_gym/Lookup-v0"}, **sections})


def unexplained(section: type[Section]) -> list[str]:
    names = []
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            assert field.annotation.__doc__
            names += unexplained(field.annotation)
        elif not field.description:
            names.append(f"{section.__name__}.{name}")
    return names


def test_every_setting_is_explained():
    assert unexplained(RunConfig) == []


def test_what_is_saved_is_loaded_again_equal(tmp_path):
    written = config(grpo={"batches": 3}, env={"id": "a/B-v1", "kwargs": {"size": 4}}, engine={"python": "/usr/bin/python3"}, seed=7)
    written.save(tmp_path / "config.yaml")
    assert RunConfig.load(tmp_path / "config.yaml") == written
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_the_saved_file_names_the_defaults_too(tmp_path):
    config().save(tmp_path / "config.yaml")
    values = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert values["grpo"]["clip_high"] == 0.28


def test_an_error_names_the_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("env: {id: art_gym/Lookup-v0}\ngrpo: {batchs: 12}\n")
    with pytest.raises(UsageError) as caught:
        RunConfig.load(path)
    assert str(caught.value) == f"{path}: unknown key 'grpo.batchs'; did you mean 'grpo.batches'?"


def test_scientific_notation_without_a_point_is_a_number():
    # YAML 1.1 reads 1e-4 as a text.
    assert RunConfig.from_values(yaml.safe_load("{env: {id: a}, grpo: {learning_rate: 1e-4}}")).grpo.learning_rate == 0.0001


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"grpo": {"group_size": 1}}, "grpo.group_size is 1; it must be greater than or equal to 2"),
        ({"grpo": {"steps_per_batch": 9, "groups_per_batch": 8}}, r"grpo: steps_per_batch \(9\) must be at most groups_per_batch \(8\)"),
        ({"engine": {"attach": "http://box"}, "grpo": {"publisher": "merged"}}, r"grpo\.publisher merged writes .* use lora"),
        ({"engine": {"model": "m"}}, "engine: model is the name that an attached server serves; without attach give model.name"),
        ({"engine": {"api_key_env": "KEY"}}, "engine: api_key_env is for an attached server; give attach too"),
        ({"engine": {"max_model_len": 15}}, "engine.max_model_len is 15; it must be greater than or equal to 16"),
        ({"rollout": {"temperature": 0}}, "rollout.temperature is 0; it must be greater than 0"),
        ({"rollout": {"temperature": "nan"}}, "finite"),
        ({"evaluation": {"split": "train"}}, "it must be 'validation' or 'test'"),
        ({"engine": {"port": 70000}}, "engine.port is 70000"),
        ({"rollout": {"max_tokens": 2048}, "engine": {"max_model_len": 2048}}, r"must be below engine\.max_model_len"),
        ({"env": {}}, "missing key 'env.id'"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_what_can_not_be_is_refused_in_one_line(sections, message):
    with pytest.raises(UsageError, match=message) as caught:
        config(**sections)
    assert "\n" not in str(caught.value)


def test_steps_need_not_divide_the_groups():
    assert config(grpo={"steps_per_batch": 3, "groups_per_batch": 8}).grpo.steps_per_batch == 3


def test_differences_are_named_by_their_dotted_keys():
    assert config().differences(config()) == []
    assert config(seed=1, grpo={"batches": 2}).differences(config()) == ["grpo.batches", "seed"]
    assert config(env={"id": "art_gym/Lookup-v0", "kwargs": {"size": 4}}).differences(config()) == ["env.kwargs.size"]


def test_every_bundled_recipe_is_valid_and_found_by_its_environment():
    folder = resources.files("art_gym.cli") / "recipes"
    files = [file for file in folder.iterdir() if file.name.endswith(".yaml")]
    assert len(files) >= 2
    for file in files:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
        assert RunConfig.from_values(values, file.name).env.id == values["env"]["id"]
        assert recipe(values["env"]["id"]) == values


def test_a_recipe_is_found_by_an_id_with_its_package():
    values = recipe("art_gym_envs:art_gym/Lookup-v0")
    assert values.pop("env") == recipe("art_gym/Lookup-v0")["env"] | {"id": "art_gym_envs:art_gym/Lookup-v0"}
    assert values == {key: value for key, value in recipe("art_gym/Lookup-v0").items() if key != "env"}
