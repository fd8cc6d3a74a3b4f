"""Trained policies in an evaluation: which one a folder means, how it is served, and the servers that run already."""

import json
import shutil
import sys
from pathlib import Path

import pytest

import art_gym.engine
from art_gym.cli import _eval_policies, main, preflight
from art_gym.cli._eval_digests import digest_of
from art_gym.cli._eval_settings import AgentSetting, Settings
from art_gym.cli.config import RunConfig
from art_gym_agents import RandomAgent
from art_gym_trainers import checkpoints

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

GUESS = "art_gym/GuessNumber-v0"
SETTINGS = Settings(GUESS, (AgentSetting("a", "runs/mine"),), concurrency=7, max_model_len=512, port=0)


@pytest.fixture
def run(tmp_path) -> Path:
    """The folder of a run with the checkpoints of batches 3 to 5; nothing in them is what torch would have written."""
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    config = {
        "env": {"id": GUESS},
        "model": {"name": "some/base", "dtype": "bfloat16"},
        "engine": {"device": "cpu", "tool_parser": "llama3_json", "max_model_len": 4096},
    }
    RunConfig.from_values(config).save(folder / "config.yaml")
    for step in (3, 4, 5):
        with checkpoints.writing(folder / "checkpoints", step, {}) as scratch:
            (scratch / "adapter_model.safetensors").write_bytes(b"adapter" * step)
            (scratch / "adapter_config.json").write_text(json.dumps({"r": 4, "base_model_name_or_path": "elsewhere"}))
    return folder


def scored(run: Path, **success: float) -> None:
    # Batch 5 was played by the policy of checkpoint 4.
    rows = [{"step": int(key[1:]), "success_rate": rate} for key, rate in success.items()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_plays_its_best_checkpoint_or_its_newest(run):
    policy = _eval_policies.find(run)
    assert (policy.name, policy.checkpoint.step, policy.base, policy.base_dtype) == ("mine@5", 5, "some/base", "bfloat16")
    scored(run, _4=0.9, _5=0.5)
    assert _eval_policies.find(run).name == "mine@3"


def test_a_checkpoint_plays_as_it_is_named(run):
    scored(run, _4=0.9, _5=0.5)
    assert _eval_policies.find(run / "checkpoints" / "step-0004").name == "mine@4"


def test_a_bare_adapter_names_its_base(tmp_path, run):
    folder = tmp_path / "exports" / "adapter"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "base_model_name_or_path": "some/base"}))
    policy = _eval_policies.find(folder)
    assert (policy.name, policy.base, policy.base_dtype, policy.checkpoint.folder) == ("adapter", "some/base", None, folder)


def test_a_model_is_no_trained_policy(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert _eval_policies.find(tmp_path / "model") is None


def test_what_can_not_be_played_is_told(run, tmp_path, refused):
    (tmp_path / "empty").mkdir()
    RunConfig.from_values({"env": {"id": GUESS}}).save(tmp_path / "empty" / "config.yaml")
    assert "has no checkpoint yet" in refused("eval", GUESS, "--agent", "empty")
    damaged = run / "checkpoints" / "step-0005" / "adapter_model.safetensors"
    damaged.write_bytes(b"other")
    assert "has 5 bytes and not the 35 that were written" in refused("eval", GUESS, "--agent", "runs/mine")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "adapter_config.json").write_text("{}")
    assert "names no base model" in refused("eval", GUESS, "--agent", "bare")
    (tmp_path / "bare" / "adapter_config.json").write_text("[")
    assert "adapter_config.json is damaged" in refused("eval", GUESS, "--agent", "bare")
    (run / "config.yaml").unlink()
    assert "is a checkpoint without its run" in refused("eval", GUESS, "--agent", "runs/mine/checkpoints/step-0004")


def test_a_missing_package_is_told_before_anything_is_merged(run, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    line = refused("eval", GUESS, "--agent", "runs/mine")
    assert line == "playing a checkpoint needs the package 'peft', which isn't installed: pip install 'art-gym[train]'"


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Engines that are never started; gives what each would have been, and the adapters that it was told to load."""
    found = []

    class Fake:
        base_url = "http://127.0.0.1:1/v1"

        def __init__(self, config, *, log, progress):
            self.config, self.log, self.model, self.adapters = config, log, config.name, []
            found.append(self)

        def __enter__(self):
            self.files = sorted(path.name for path in Path(self.config.model).iterdir())
            return self

        def __exit__(self, *error):
            pass

        def load_adapter(self, name, path):
            self.adapters.append((name, path))

    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text('{"dtype": "bfloat16"}')
    monkeypatch.setattr("art_gym.engine.Engine", Fake)
    monkeypatch.setattr(preflight, "resolve_model", lambda name, progress: base)
    return found


def test_on_the_cpu_it_is_merged_in_float32_and_served_from_a_folder_that_goes_again(run, launched, monkeypatch):
    def export(checkpoint, base, folder, *, form, dtype, base_dtype):
        assert (checkpoint.step, base.name, form, dtype, base_dtype) == (5, "base", "merged", "float32", "bfloat16")
        folder.mkdir(parents=True)
        (folder / "model.safetensors").touch()

    monkeypatch.setattr("art_gym_trainers.export.export", export)
    with _eval_policies.find(run).served(SETTINGS, log=None, progress=lambda line: None) as engine:
        assert (engine.model, engine.files, engine.adapters) == ("mine@5", ["model.safetensors"], [])
        config = engine.config
        # The run's engine, with the evaluation's own settings.
        assert (config.tool_parser, config.max_model_len, config.max_num_seqs, config.dtype) == ("llama3_json", 512, 7, "float32")
        assert Path(config.model).exists()
    assert not Path(config.model).exists()


def test_on_a_gpu_the_adapter_is_served_beside_its_base(run, launched):
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("device: cpu", "device: cuda"))
    with _eval_policies.find(run).served(SETTINGS, log=None, progress=lambda line: None) as engine:
        assert (engine.config.enable_lora, engine.config.max_lora_rank, engine.config.dtype) == (True, 4, "bfloat16")
        assert engine.adapters == [("mine@5", run / "checkpoints" / "step-0005")]
        assert engine.model == "mine@5"
        assert engine.files == ["config.json"]


def test_a_checkpoint_of_the_whole_model_is_written_out_anywhere(run, launched, monkeypatch):
    with checkpoints.writing(run / "checkpoints", 6, {}) as scratch:
        (scratch / "model.safetensors").write_bytes(b"weights")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("device: cpu", "device: cuda"))
    monkeypatch.setattr("art_gym_trainers.export.export", lambda checkpoint, base, folder, **options: folder.mkdir())
    with _eval_policies.find(run).served(SETTINGS, log=None, progress=lambda line: None) as engine:
        assert (engine.config.enable_lora, engine.config.dtype, engine.model) == (False, "bfloat16", "mine@6")


@pytest.fixture
def torn(run, launched, monkeypatch, tmp_path):
    """An evaluation of the run of which one episode is missing; gives the arguments that go on with it."""
    monkeypatch.setattr(art_gym.engine.Engine, "check", lambda self: None, raising=False)
    monkeypatch.setattr("art_gym_trainers.export.export", lambda checkpoint, base, folder, **options: folder.mkdir())
    monkeypatch.setattr(preflight, "check_launch", lambda config: None)
    monkeypatch.setattr("art_gym_agents.ChatAgent", lambda url, model, *, name, **options: RandomAgent(name=name))
    monkeypatch.setattr("art_gym.cli._eval_report.draw", lambda result, path: "")
    arguments = ["eval", GUESS, "--agent", "runs/mine", "--n", "3", "--out", "out"]
    assert main(arguments) == 0
    journal = tmp_path / "out" / "episodes" / "eval.jsonl"
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:2]))
    return [*arguments, "--resume"]


def test_a_resumed_evaluation_goes_on_with_the_checkpoint_that_it_began_with(run, torn, launched, capsys):
    scored(run, _4=0.9, _5=0.5)
    capsys.readouterr()
    assert main([*torn, "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["evaluations"]
    assert [engine.model for engine in launched] == ["mine@5", "mine@5"]
    facts = result["played_by"]
    assert (facts["spec"], facts["model"], facts["step"], facts["base"]) == ("runs/mine", "mine@5", 5, "some/base")
    assert facts["digest"] == digest_of(run / "checkpoints" / "step-0005")


def test_a_checkpoint_whose_weights_are_others_meanwhile_is_not_gone_on_with(run, torn, refused):
    shutil.rmtree(run / "checkpoints" / "step-0005")
    with checkpoints.writing(run / "checkpoints", 5, {}) as scratch:
        (scratch / "adapter_model.safetensors").write_bytes(b"adapter" * 6)
        (scratch / "adapter_config.json").write_text("{}")
    assert "were played with digest '" in refused(*torn)
    shutil.rmtree(run / "checkpoints" / "step-0005")
    assert "step-0005 is no whole checkpoint; there are those of: 3, 4" in refused(*torn)


def test_a_digest_tells_weights_apart(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".cache").write_text("of no account")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"\0" * 100)
    small = digest_of(tmp_path)
    weights.write_bytes(b"\0" * 99 + b"\1")
    assert digest_of(tmp_path) != small
    # Beyond 64 MiB a sample is read, the last block among it.
    with weights.open("wb") as file:
        file.truncate(65 << 20)
    large = digest_of(tmp_path)
    assert digest_of(tmp_path) == large
    with weights.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\1")
    assert digest_of(tmp_path) != large


@pytest.mark.train
@pytest.mark.slow
def test_what_is_served_are_the_weights_that_were_trained(configured, tiny_model, tmp_path, monkeypatch):
    import torch
    from safetensors.torch import load_file

    from art_gym_trainers.policy import load_policy
    from art_gym_trainers.publish import merged_state

    folder = tmp_path / "runs" / "tiny"
    folder.parent.mkdir()
    configured(folder, GUESS, engine={"device": "cpu"})
    policy = load_policy(tiny_model, dtype="float32", lora_rank=4, lora_alpha=8)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.01)
    with checkpoints.writing(folder / "checkpoints", 1, {}) as scratch:
        policy.save_pretrained(scratch)
    seen = {}

    class Fake:
        def __init__(self, config, **options):
            self.config = config

        def __enter__(self):
            seen.update(load_file(Path(self.config.model) / "model.safetensors"))
            return self

        def __exit__(self, *error):
            pass

    monkeypatch.setattr("art_gym.engine.Engine", Fake)
    with _eval_policies.find(folder).served(SETTINGS, log=None, progress=lambda line: None):
        pass
    expected = merged_state(policy, "float32")
    assert seen.keys() == expected.keys()
    assert all(torch.equal(seen[name], expected[name]) for name in expected)


def test_engines_run_one_after_the_other(run, launched, monkeypatch, tmp_path):
    running, order = [], []
    fake = art_gym.engine.Engine

    def enter(self):
        assert not running, "two engines at once"
        running.append(self)
        order.append(self.model)
        return self

    monkeypatch.setattr(fake, "__enter__", enter)
    monkeypatch.setattr(fake, "__exit__", lambda self, *error: running.remove(self))
    monkeypatch.setattr(fake, "check", lambda self: None, raising=False)
    monkeypatch.setattr("art_gym_trainers.export.export", lambda checkpoint, base, folder, **options: folder.mkdir())
    monkeypatch.setattr(preflight, "check_launch", lambda config: None)
    monkeypatch.setattr("art_gym_agents.ChatAgent", lambda url, model, *, name, **options: RandomAgent(name=name))
    agents = ["--agent", "first=runs/mine", "--agent", "second=runs/mine/checkpoints/step-0003", "--agent", "base=some/base"]
    assert main(["eval", GUESS, *agents, "--n", "3"]) == 0
    assert order == ["mine@5", "mine@3", "some/base"]
    assert running == []
