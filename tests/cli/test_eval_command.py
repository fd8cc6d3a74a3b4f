"""`art-gym eval`: several agents and episodes, what is kept, going on, and requests that can't be right."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from art_gym.cli import _eval, _eval_report, main
from art_gym.cli._eval_agents import Entrant
from art_gym.cli._eval_settings import Settings, parse_agents
from art_gym.comparison import Comparison
from art_gym.errors import EngineError, UsageError
from art_gym.store import EpisodeStore

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

LOOKUP = "art_gym/Lookup-v0"
GUESS = "art_gym/GuessNumber-v0"


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """Agents of one's own: `counts` finds every number of three, `ones` one of them, and `breaks` none."""
    (tmp_path / "own_scripts.py").write_text(
        "import art_gym\n"
        "def counts(state):\n    return art_gym.call('guess', number=state.turn + 1)\n"
        "def ones(state):\n    return art_gym.call('guess', number=1)\n"
        "def breaks(state):\n    raise RuntimeError('no idea')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def guess(*agents: str, n: int = 12, k: int = 2) -> list[str]:
    chosen = [part for agent in agents for part in ("--agent", agent)]
    return ["eval", GUESS, *chosen, "--n", str(n), "--k", str(k), "--env", "high=3", "--env", "max_turns=3"]


@pytest.mark.usefixtures("scripts")
def test_agents_are_reported_side_by_side(capsys):
    assert main(guess("finds=own_scripts:counts", "own_scripts:ones")) == 0
    first, second, differences = capsys.readouterr().out.strip().split("\n\n")
    # All twelve scenarios went alike, which says as much as twelve episodes: Wilson's lower bound is n / (n + z²).
    assert "agent          finds\nplayed by      own_scripts:counts\nsuccess        100.0% (24 of 24, 95% interval 75.8% to 100.0%)" in first
    assert "pass@k         1: 100.0%, 2: 100.0%" in first
    assert "agent          own_scripts:ones" in second
    assert "own_scripts:ones against finds: success -" in differences
    assert "12 scenarios" in differences


@pytest.mark.usefixtures("scripts")
def test_one_agent_may_find_what_another_did_not(tmp_path, capsys):
    assert main([*guess("finds=own_scripts:counts", "ones=own_scripts:ones"), "--out", "out", "--json"]) == 0
    out = tmp_path / "out"
    printed = json.loads(capsys.readouterr().out)
    assert json.loads((out / "evaluation.json").read_text())["result"] == printed
    assert printed["format"] == 2
    assert [entry["played_by"] for entry in printed["evaluations"]] == [{"spec": "own_scripts:counts"}, {"spec": "own_scripts:ones"}]
    # A script plays a scenario's episodes alike: where the number is 1 it is found at once, else never.
    with EpisodeStore(out) as store:
        assert store.labels() == ["eval-finds", "eval-ones"]
        hidden = [episode.scenario for episode in store.journal("eval-finds").read() if len(episode.turns) == 1]
    ones = Comparison.from_dict(printed).evaluations[1]
    assert ones.successes == len(hidden)
    (difference,) = printed["differences"]
    assert difference["success"]["difference"] == pytest.approx(len(hidden) / 24 - 1)


@pytest.mark.usefixtures("scripts")
def test_the_outcome_is_kept_as_markdown_and_picture(tmp_path):
    assert main([*guess("finds=own_scripts:counts", "ones=own_scripts:ones"), "--out", "out"]) == 0
    kept = sorted(path.name for path in (tmp_path / "out").iterdir() if path.suffix != ".png")
    assert kept == ["episodes", "evaluation.json", "evaluation.md"]
    text = (tmp_path / "out" / "evaluation.md").read_text()
    assert text.startswith(f"# {GUESS}\n\n12 scenarios of the test split (high=3, max_turns=3), each played 2 times;")
    assert "| finds | 100.0% | 24 |" in text
    assert "| finds | 100.0% | 100.0% | 100.0% | 100.0% |" in text
    assert "| ones against finds | success | -" in text
    assert "| ones | policy call |" in text


@pytest.mark.slow
@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize("k", [1, 2])
def test_the_picture_is_one(tmp_path, k):
    pytest.importorskip("matplotlib")
    assert main([*guess("finds=own_scripts:counts", "ones=own_scripts:ones", k=k), "--out", "out"]) == 0
    assert (tmp_path / "out" / "evaluation.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_without_matplotlib_a_line_says_why_there_is_no_picture(tmp_path, capsys, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["eval", LOOKUP, "--agent", "random", "--n", "3", "--out", "out"]) == 0
    expected = "no evaluation.png: it needs the package 'matplotlib', which isn't installed: pip install 'art-gym[train]'"
    assert expected in capsys.readouterr().err.splitlines()
    assert not (tmp_path / "out" / "evaluation.png").exists()
    assert (tmp_path / "out" / "evaluation.md").exists()


@pytest.fixture
def undrawn(monkeypatch):
    """No picture: drawing it takes longer than all the rest."""
    monkeypatch.setattr(_eval_report, "draw", lambda result, path: "")


@pytest.mark.usefixtures("scripts", "undrawn")
def test_only_what_is_missing_is_played_of_each_agent(tmp_path, capsys):
    arguments = [*guess("finds=own_scripts:counts", "ones=own_scripts:ones", n=5), "--out", "out"]
    assert main(arguments) == 0
    whole, torn = (tmp_path / "out" / "episodes" / f"eval-{name}.jsonl" for name in ("finds", "ones"))
    before, lines = whole.read_bytes(), torn.read_text().splitlines(keepends=True)
    torn.write_text("".join(lines[:4]))
    first = json.loads((tmp_path / "out" / "evaluation.json").read_text())["result"]
    assert main([*arguments, "--resume", "--concurrency", "3", "--seed", "4"]) == 0
    assert whole.read_bytes() == before
    assert torn.read_text().splitlines(keepends=True)[:4] == lines[:4]
    assert len(torn.read_text().splitlines()) == 10
    second = json.loads((tmp_path / "out" / "evaluation.json").read_text())["result"]
    for old, new in zip(first["evaluations"], second["evaluations"], strict=True):
        assert new["scenarios"] == old["scenarios"]
    # What took time is remembered of whom nothing was played.
    assert second["evaluations"][0]["seconds"] == first["evaluations"][0]["seconds"]


@pytest.mark.usefixtures("scripts", "undrawn")
def test_an_agent_may_be_added_and_none_left_out_or_exchanged(tmp_path, refused, capsys):
    assert main([*guess("finds=own_scripts:counts", n=3), "--out", "out"]) == 0
    before = (tmp_path / "out" / "episodes" / "eval.jsonl").read_bytes()
    assert main([*guess("finds=own_scripts:counts", "ones=own_scripts:ones", n=3), "--out", "out", "--resume"]) == 0
    assert (tmp_path / "out" / "episodes" / "eval.jsonl").read_bytes() == before
    assert len((tmp_path / "out" / "episodes" / "eval-ones.jsonl").read_text().splitlines()) == 6
    capsys.readouterr()
    line = refused(*guess("ones=own_scripts:ones", n=3), "--out", "out", "--resume")
    assert line.endswith("other settings than you ask for: agent 'finds' plays there and isn't given; give the same, or another --out")
    line = refused(*guess("finds=own_scripts:ones", "ones=own_scripts:ones", n=3, k=3), "--out", "out", "--resume")
    assert "ask for: k was 2 and is 3, agent 'finds' was 'own_scripts:counts' and is 'own_scripts:ones'; give the same" in line


@pytest.mark.usefixtures("scripts", "undrawn")
def test_failed_episodes_are_tried_again_unless_they_are_to_stand(tmp_path, monkeypatch, capsys):
    (tmp_path / "sometimes.py").write_text(
        "import art_gym, pathlib\n"
        "def play(state):\n"
        "    if pathlib.Path('broken').exists() and state.scenario.id == 'test-1':\n        raise RuntimeError('no idea')\n"
        "    return art_gym.call('guess', number=state.turn + 1)\n"
    )
    (tmp_path / "broken").touch()
    arguments = [*guess("sometimes:play", n=3, k=1), "--out", "out"]
    assert main(arguments) == 0
    (tmp_path / "broken").unlink()
    settings = Settings(
        GUESS, parse_agents(["sometimes:play"], model=None, base_url=None), {"high": 3, "max_turns": 3}, n=3, keep_failures=True
    )
    capsys.readouterr()
    _eval.run(settings, api_key=None, out=tmp_path / "out", resume=True, as_json=True)
    (result,) = json.loads(capsys.readouterr().out)["evaluations"]
    assert (result["failures"], result["replayed"]) == ({"policy": 1}, {})
    assert main([*arguments, "--resume"]) == 0
    assert "attempts       4 at 3 episodes; played again after they had failed: 1 (policy)\n" in capsys.readouterr().out
    assert "| sometimes:play | 0 | 4 | 1 (policy) |" in (tmp_path / "out" / "evaluation.md").read_text()


class DeadEngine:
    """An engine that can't be started."""

    def __enter__(self):
        raise EngineError("the engine died\nits log's tail")

    def __exit__(self, *error):
        pass


@pytest.mark.usefixtures("scripts", "undrawn")
@pytest.mark.parametrize("place", [0, 1])
def test_an_engine_that_fails_costs_no_other_agent_its_result(tmp_path, capsys, monkeypatch, place):
    def entrant(agent, *arguments, **options):
        return Entrant(dict, lambda log: DeadEngine()) if agent.name == "dead" else real(agent, *arguments, **options)

    real = _eval.entrant
    monkeypatch.setattr(_eval, "entrant", entrant)
    agents = ["fine=own_scripts:counts", "also=own_scripts:ones"]
    agents.insert(place, "dead=some/model")
    assert main([*guess(*agents, n=3), "--out", "out"]) == 1
    output = capsys.readouterr()
    assert "agent          fine\n" in output.out
    assert "also against fine: success" in output.out
    assert output.out.endswith("dead came to no end: the engine died its log's tail\n")
    assert output.err.splitlines()[-1] == "error: dead came to no end and has no result: the engine died"
    kept = json.loads((tmp_path / "out" / "evaluation.json").read_text())["result"]
    assert [entry["agent"] for entry in kept["evaluations"]] == ["fine", "also"]
    assert kept["unfinished"] == {"dead": "the engine died\nits log's tail"}
    assert "dead came to no end: the engine died its log's tail\n" in (tmp_path / "out" / "evaluation.md").read_text()
    # It is back: only that agent is missing.
    monkeypatch.setattr(_eval, "entrant", lambda agent, settings, **options: real(replace(agent, spec="random"), settings, **options))
    assert main([*guess(*agents, n=3), "--out", "out", "--resume"]) == 0
    kept = json.loads((tmp_path / "out" / "evaluation.json").read_text())["result"]
    assert (len(kept["evaluations"]), kept["unfinished"]) == (3, {})


@pytest.mark.usefixtures("scripts", "undrawn")
def test_an_engine_that_fails_alone_is_the_commands_error(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(_eval, "entrant", lambda *arguments, **options: Entrant(dict, lambda log: DeadEngine()))
    assert main([*guess("dead=some/model"), "--out", "out"]) == 1
    assert not (tmp_path / "out").exists()
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", "error: the engine died\nits log's tail\n")


@pytest.mark.usefixtures("scripts", "undrawn")
def test_an_interruption_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(_eval, "evaluate", interrupted)
    assert main([*guess("own_scripts:counts"), "--out", "out"]) == 130
    assert capsys.readouterr().err.splitlines()[-2:] == [
        "what ended is kept; --resume goes on with the evaluation in out",
        "error: interrupted",
    ]


@pytest.mark.usefixtures("scripts", "undrawn")
def test_one_agent_that_always_fails_leaves_the_other_its_result(tmp_path, capsys):
    assert main([*guess("fine=own_scripts:counts", "broken=own_scripts:breaks", n=3), "--out", "out"]) == 1
    output = capsys.readouterr()
    assert "agent          fine\nplayed by      own_scripts:counts\nsuccess        100.0%" in output.out
    assert output.err.splitlines()[-1] == "error: all 6 episodes of broken failed; the first: RuntimeError: no idea"
    assert "- broken, policy: RuntimeError: no idea" in (tmp_path / "out" / "evaluation.md").read_text()


@pytest.mark.usefixtures("scripts")
def test_it_is_given_up_when_too_many_fail(capsys):
    assert main([*guess("own_scripts:breaks", n=30), "--max-failure-rate", "0.1"]) == 1
    assert "max_failure_rate" in capsys.readouterr().err


def typed(monkeypatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


@pytest.mark.usefixtures("undrawn")
def test_a_person_leaves_and_goes_on_later(tmp_path, monkeypatch, capsys):
    arguments = ["eval", GUESS, "--agent", "human", "--n", "2", "--env", "high=1", "--out", "out"]
    typed(monkeypatch, "guess 1\n:quit\n")
    assert main(arguments) == 0
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.endswith("the player left; --resume goes on with the evaluation in out\n")
    assert '"result": null' in (tmp_path / "out" / "evaluation.json").read_text()
    # One episode is over, and isn't asked for again.
    typed(monkeypatch, "guess 1\n")
    assert main([*arguments, "--resume"]) == 0
    output = capsys.readouterr()
    assert "agent          human\nsuccess        100.0% (2 of 2" in output.out
    assert "scenario test-0" not in output.err


@pytest.fixture
def slowly(tmp_path):
    """An evaluation of 160 episodes in another process; gives it after some have ended, its command, environment and journal."""
    (tmp_path / "slow_script.py").write_text(
        "import asyncio, art_gym\n"
        "async def play(state):\n    await asyncio.sleep(0.02)\n    return art_gym.call('guess', number=state.turn + 1)\n"
    )
    program = "from art_gym.cli import main; raise SystemExit(main())"
    arguments = [sys.executable, "-c", program, *guess("slow_script:play", n=40, k=4), "--out", "out", "--concurrency", "4"]
    journal = tmp_path / "out" / "episodes" / "eval.jsonl"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        give_up = time.monotonic() + 60
        while not (journal.exists() and journal.read_bytes().count(b"\n") >= 5):
            assert process.poll() is None, process.communicate()[1].decode()
            assert time.monotonic() < give_up
            time.sleep(0.01)
        yield process, arguments, environment, journal
        process.kill()


@pytest.mark.slow
def test_a_kill_loses_no_finished_episode(tmp_path, slowly):
    process, arguments, environment, journal = slowly
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = journal.read_bytes().rpartition(b"\n")[0]
    assert finished.count(b"\n") < 159
    subprocess.run([*arguments, "--resume"], env=environment, check=True, capture_output=True)
    assert journal.read_bytes().startswith(finished)
    with EpisodeStore(tmp_path / "out") as store:
        played = [episode.id for episode in store.journal("eval").read()]
    assert sorted(played) == sorted(f"eval/{index}/{member}" for index in range(40) for member in range(4))


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on_and_that_works(slowly):
    process, arguments, environment, _ = slowly
    process.send_signal(signal.SIGINT)
    told = process.stderr.read().decode().splitlines()
    assert process.wait(30) == 130
    assert told[-2:] == ["what ended is kept; --resume goes on with the evaluation in out", "error: interrupted"]
    done = subprocess.run([*arguments, "--resume", "--json"], env=environment, check=True, capture_output=True)
    (result,) = json.loads(done.stdout)["evaluations"]
    # What was cut off by the interruption is no attempt that failed.
    assert (result["n"], result["successes"], result["replayed"]) == (160, 160, {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--agent", "random", "--agent", "random"], "two agents have the name 'random'; give one another name: --agent NAME=random"),
        (["--agent", "random", "--k", "0"], "greater than or equal to 1"),
        (["--agent", "random", "--max-failure-rate", "2"], "--max-failure-rate"),
        (["--agent", "humna"], "did you mean 'human'?"),
        (["--agent", "mine=rnadom"], "unknown agent 'rnadom'"),
        (["--agent", "random", "--model", "smollm2-135m"], "--model says what --agent chat is, and that doesn't play; add --agent chat"),
        (["--agent", "random", "--agent", "x=./no/such/folder"], "--agent ./no/such/folder: there is no such folder"),
        (["--agent", "random", "--agent", "http://127.0.0.1:9/v1"], "no server answers at http://127.0.0.1:9/v1"),
        (["--agent", "random", "--agent", "no_such_module:play"], "No module named 'no_such_module'"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_is_played(refused, arguments, message):
    assert message in refused("eval", LOOKUP, *arguments, "--out", "out")


def test_agents_are_named_after_what_they_are(tmp_path):
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "checkpoints" / "step-0010").mkdir(parents=True)
    specs = ["random", "my.module:play", "http://box:8000/v1#org/model", "http://box:8000/v1", "models/mine", "runs/first", "x=random"]
    specs += ["runs/first/checkpoints/step-0010", "smollm2-135m", "org/model-2"]
    expected = ["random", "my.module:play", "org/model", "box:8000", "mine", "first", "x", "first-step-0010", "smollm2-135m", "org/model-2"]
    assert [agent.name for agent in parse_agents(specs, model=None, base_url=None)] == expected
    assert parse_agents([], model="m", base_url="http://box:1/v1")[0].name == "m"
    assert parse_agents([], model=None, base_url="http://box:1/v1")[0].name == "box:1"
    with pytest.raises(UsageError, match="who plays"):
        parse_agents([], model=None, base_url=None)


@pytest.mark.usefixtures("undrawn")
def test_names_that_make_the_same_file_get_journals_of_their_own(tmp_path):
    agents = ["--agent", "a@b=random", "--agent", "a-b=warm-start"]
    assert main(["eval", LOOKUP, *agents, "--n", "2", "--out", "out"]) == 0
    with EpisodeStore(tmp_path / "out") as store:
        assert store.labels() == ["eval-a-b", "eval-a-b-2"]


@pytest.mark.slow
def test_ctrl_c_ends_while_a_person_thinks():
    program = "from art_gym.cli import main; raise SystemExit(main())"
    arguments = [sys.executable, "-c", program, "eval", GUESS, "--agent", "human", "--n", "1"]
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        shown = b""
        while b"> " not in shown:
            shown += process.stderr.read(1)
        process.send_signal(signal.SIGINT)
        # The input stays open: nobody waits for the thread that reads it.
        rest = process.stderr.read()
        assert process.wait(30) == 130
    assert rest.decode().splitlines() == ["error: interrupted"]
