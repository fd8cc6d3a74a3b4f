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
        ({"grpo": {"discount": 0.9}}, r"grpo: discount \(0\.9\) acts on the rewards of turns; set credit to turn, or leave discount at 1"),
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
        ({"checkpoints": {"keep_last": 0}}, "checkpoints.keep_last is 0; it must be greater than 0"),
        ({"checkpoints": {"metric": "success"}}, "checkpoints.metric is 'success'; it must be 'success_rate', "),
        ({"alarms": {"kl_sampler": {"stop": 0.01}}}, r"alarms: kl_sampler\.stop \(0\.01\) must be at least kl_sampler\.warn \(0\.05\)"),
        ({"alarms": {"entropy": {"stop": 0.01}}}, r"alarms: entropy\.stop \(0\.01\) must be at most entropy\.warn \(0\.005\)"),
        ({"alarms": {"kl_sampler": {"halt": 1}}}, "unknown key 'alarms.kl_sampler.halt'; the keys of 'alarms.kl_sampler' are: warn, stop"),
        ({"alarms": {"kl_samplr": {"warn": 1}}}, "unknown key 'alarms.kl_samplr'; did you mean 'alarms.kl_sampler'"),
        ({"alarms": {"kl_sampler": 0.1}}, "alarms.kl_sampler is 0.1; it must be a section with keys of its own"),
        ({"alarms": 3}, "alarms is 3; it must be a section"),
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


def test_one_limit_of_an_alarm_can_be_given_without_the_other():
    alarms = config(alarms={"kl_sampler": {"stop": 0.5}, "fork_rate": {"warn": None}}).alarms
    assert (alarms.kl_sampler.warn, alarms.kl_sampler.stop) == (0.05, 0.5)
    assert (alarms.fork_rate.warn, alarms.fork_rate.stop) == (None, None)
    assert (alarms.entropy.warn, alarms.entropy.stop) == (0.005, None)


def test_the_alarms_that_a_low_figure_raises_are_checked_as_such():
    from art_gym_trainers.alarms import ALARMS, BELOW

    for name in ALARMS:
        limits = {"warn": 0.5, "stop": 0.1} if name in BELOW else {"warn": 0.1, "stop": 0.5}
        config(alarms={name: limits})
        with pytest.raises(UsageError, match="must be at"):
            config(alarms={name: {"warn": limits["stop"], "stop": limits["warn"]}})


def test_what_changes_nothing_of_the_run_is_no_difference():
    assert config(alarms={"kl_sampler": {"stop": 1}}, checkpoints={"keep_last": 9}).differences(config()) == []


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


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"rollout": {"oversample": 1, "branch": {1: 2}}}, "either oversample or branch"),
        ({"rollout": {"branch": {0: 2}}}, "greater than 0"),
        ({"rollout": {"max_failure_rate": 1.5}}, "less than or equal to 1"),
        ({"grpo": {"credit": "tree", "advantage": "leave_one_out"}}, "another than leave_one_out"),
        ({"grpo": {"credit": "tree", "discount": 0.9}}, "set credit to turn"),
    ],
)
def test_rollouts_that_can_not_be_are_refused(values, problem):
    with pytest.raises(UsageError, match=problem):
        RunConfig.from_values({"env": {"id": "x/Y-v0"}, **values})


def test_branches_come_back_from_the_file(tmp_path):
    config = RunConfig.from_values({"env": {"id": "x/Y-v0"}, "rollout": {"branch": {1: 2, 3: 1}}})
    config.save(tmp_path / "config.yaml")
    assert RunConfig.load(tmp_path / "config.yaml").rollout.branch == {1: 2, 3: 1}
