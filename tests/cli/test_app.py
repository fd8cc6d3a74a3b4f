"""The command line: what it prints, how it fails, and that a wrong request leaves nothing behind."""

import json
import socket
import subprocess
import sys
import time

import pytest

import art_gym
from art_gym.cli import main
from art_gym.cli.app import app

LOOKUP = "art_gym/Lookup-v0"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refused(capsys, tmp_path):
    """Run a wrong request; it must end with code 2 and one line, and leave nothing. Gives the line."""

    def run(*arguments: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        assert main(arguments) == 2
        output = capsys.readouterr()
        assert output.out == ""
        (line,) = output.err.splitlines()
        assert line.startswith("error: ")
        assert sorted(tmp_path.rglob("*")) == before
        return line.removeprefix("error: ")

    return run


def test_an_unknown_environment(refused):
    assert refused("train", "art_gym/Loookup-v0") == "unknown environment 'art_gym/Loookup-v0'; did you mean 'art_gym/Lookup-v0'?"
    assert "did you mean 'art_gym/Lookup-v0'?" in refused("eval", "art_gym/Loookup-v0", "--agent", "random")


def test_an_unknown_argument_of_the_environment(refused):
    assert "has no option 'poeple'; did you mean 'people'?" in refused("train", LOOKUP, "--env", "poeple=3")
    assert "has no option 'poeple'; did you mean 'people'?" in refused("eval", LOOKUP, "--agent", "random", "--env", "poeple=3")


def test_an_impossible_argument_of_the_environment(refused):
    assert "people must be an integer from 1 to 32, got 0" in refused("train", LOOKUP, "--env", "people=0")


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


@pytest.mark.parametrize(("package", "extra"), [("vllm", "vllm-cpu"), ("torch", "train"), ("trl", "train")])
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
        (["eval", LOOKUP, "--agent", "random", "--n", "0"], "greater than or equal to 1"),
        (["eval", LOOKUP, "--agent", "random", "--split", "tset"], "'tset' is not one of 'train', 'validation', 'test'"),
        (["eval", LOOKUP, "--agent", "random", "--resume"], "give both"),
        (["eval", LOOKUP, "--agent", "random", "--env", "people"], "expected KEY=VALUE"),
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
    assert "has other settings than you ask for: n, temperature;" in line
    assert main([*arguments, "--resume"]) == 0
    resumed = journal.read_text().splitlines(keepends=True)
    assert resumed[:3] == lines[:3]
    assert len(resumed) == 7


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
