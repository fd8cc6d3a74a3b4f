"""`art-gym episodes`: what it prints of a journal, and how it fails. The journals are written by the store, as a run writes them."""

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from art_gym import Scenario, call
from art_gym.cli import _episodes, _journals, main
from art_gym.episodes import Episode, Failure, Turn
from art_gym.store import EpisodeStore

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

FILE = Path("run/episodes/train-0001.jsonl")


def turn(prompt, completion, *, reward=0.0, logprobs=None, **details) -> Turn:
    logprobs = [-0.5] * len(completion) if logprobs is None and completion is not None else logprobs
    return Turn(
        [{"role": "user", "content": "Go on."}],
        call("look"),
        reward=reward,
        policy="tiny@0",
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs=logprobs,
        **details,
    )


def episode(member, *turns, scenario="s", **details) -> Episode:
    details = {"terminated": True, **details}
    tools = [{"type": "function", "function": {"name": "look"}}]
    return Episode(f"train-0001/{scenario}/{member}", "x/Y-v0", Scenario(scenario, 3), member, tools=tools, turns=list(turns), **details)


@pytest.fixture
def journal():
    """Two episodes of one scenario: two turns with a reward of 1 in the end, and one of 0; then one that failed, and one that is alone."""
    long = list(range(100, 120))
    won = episode(0, turn(long, [1, 2], logprobs=[-0.25, -4.0]), turn([*long, 1, 2, 9], [3], reward=1.0, rewards={"found": 1.0}))
    lost = episode(1, turn(long, [1]), terminated=False, truncated=True, truncation="max_turns")
    failed = episode(2, failure=Failure("engine", "gone\nfor good"), terminated=False)
    alone = episode(0, turn([5], [6], invalid_calls=1), scenario="t")
    return write(won, lost, failed, alone)


def write(*episodes) -> Path:
    with EpisodeStore("run") as store:
        store.journal("train-0001").append(*episodes)
    return FILE


def printed(capsys, *arguments) -> list[str]:
    assert main([str(argument) for argument in arguments]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out.splitlines()


def test_the_episodes_of_a_journal_are_listed(journal, capsys):
    assert printed(capsys, "episodes", "ls", journal) == [
        "id              scenario  reward  turns  tokens  sampled  end",
        "train-0001/s/0  s          1.000      2      24        3  terminated",
        "train-0001/s/1  s          0.000      1      21        1  truncated: max_turns",
        "train-0001/s/2  s          0.000      0       -        -  failed: engine",
        "train-0001/t/0  t          0.000      1       2        1  terminated",
    ]


def test_the_list_as_json(journal, capsys):
    rows = json.loads("\n".join(printed(capsys, "episodes", "ls", journal, "--json")))
    assert rows[2] == {
        "id": "train-0001/s/2", "scenario": "s", "reward": 0.0, "turns": 0, "tokens": None, "sampled": None, "end": "failed: engine"
    }  # fmt: skip


def test_an_episode_that_was_played_again_is_listed_once(capsys):
    journal = write(episode(0, failure=Failure("policy", "gone")), episode(1, turn([1], [2])))
    write(episode(0, turn([1], [2])))
    assert [line.split()[-1] for line in printed(capsys, "episodes", "ls", journal)[1:]] == ["terminated", "terminated"]


def test_a_half_written_last_line_is_passed_over_by_file_and_by_run(journal, capsys):
    by_file, by_run = printed(capsys, "episodes", "ls", journal), printed(capsys, "episodes", "ls", "run", "--json")
    with journal.open("ab") as file:
        file.write(b'{"format": 1, "id": "train-0001/t/1", "env')
    assert printed(capsys, "episodes", "ls", journal) == by_file
    assert [line for line in printed(capsys, "episodes", "ls", "run", "--json") if "bytes" not in line] == [
        line for line in by_run if "bytes" not in line
    ]


def test_an_episode_is_printed_token_by_token(journal, capsys):
    # Rewards 1 and 0: 0.5 off the mean, deviation sqrt(0.5).
    assert printed(capsys, "episodes", "show", journal) == [
        "episode train-0001/s/0 of 4; the others with --episode",
        "environment  x/Y-v0",
        "scenario     s, seed 3",
        "policy       tiny@0",
        "reward       +1",
        "end          terminated",
        "tools        look",
        "",
        "sequence 1 of 1: 24 tokens, 3 sampled",
        "   place  kind       token    logprob  advantage",
        "       0  context      100",
        "       1  context      101",
        "       2  context      102",
        "       …  context  14 more tokens",
        "      17  context      117",
        "      18  context      118",
        "      19  context      119",
        "turn 0: reward +0, advantage +0.7070, stop",
        "      20  sampled        1    -0.2500    +0.7070",
        "      21  sampled        2    -4.0000    +0.7070",
        "      22  context        9",
        "turn 1: reward +1 (found +1), advantage +0.7070, stop",
        "      23  sampled        3    -0.5000    +0.7070",
    ]


def test_long_contexts_are_whole_with_all(journal, capsys):
    lines = printed(capsys, "episodes", "show", journal, "--all")
    assert sum("context" in line for line in lines) == 21
    assert not any("…" in line for line in lines)


def played(label, *groups, scenarios=None):
    """Write a journal of groups as the runner does, by their returns; the last episode to start ends first."""
    scenarios = scenarios or [f"{label}{number}" for number in range(len(groups))]
    episodes = [
        replace(episode(member, turn([1], [2], reward=value), scenario=scenarios[place]), id=f"{label}/{place}/{member}")
        for place, group in enumerate(groups)
        for member, value in enumerate(group)
    ]
    with EpisodeStore("run") as store:
        store.journal(label).append(*episodes[::-1])


def configure(**grpo):
    settings = {"group_size": 2, "groups_per_batch": 2, "steps_per_batch": 1, **grpo}
    Path("run/config.yaml").write_text(json.dumps({"env": {"id": "x/Y-v0"}, "grpo": settings}))


def shown(capsys, name) -> tuple[str, str]:
    """The first turn's advantage, and why there is none."""
    lines = printed(capsys, "episodes", "show", f"run/episodes/{name.split('/')[0]}.jsonl", "--episode", name)
    reason = next((line.removeprefix("no advantage: ") for line in lines if line.startswith("no advantage: ")), "")
    return next(line.split(", ")[1].removeprefix("advantage ") for line in lines if line.startswith("turn 0")), reason


def test_advantages_are_those_that_the_run_computes(capsys):
    won, lost = episode(0, turn([1], [2]), turn([1, 2], [3], reward=1.0)), episode(1, turn([1], [2]))
    with EpisodeStore("run") as store:
        store.journal("train-0001").append(replace(won, id="train-0001/0/0"), replace(lost, id="train-0001/0/1"))
    configure(advantage="leave_one_out", credit="turn", discount=0.5, groups_per_batch=1)
    turns = [line for line in printed(capsys, "episodes", "show", FILE) if line.startswith("turn")]
    # The first turn's return-to-go is 0.5 against 0; nobody else came to the second.
    assert [line.split(", ")[1] for line in turns] == ["advantage +0.5000", "advantage +0.0000"]


def test_a_batch_of_several_journals_is_taken_together_without_its_surplus(capsys):
    played("train-0001", [1.0, 0.0], [0.0, 0.0])
    # One of two groups was useful, so that two more are played for the one that is missing; the second of them is too many.
    played("train-0001-from-0002", [4.0, 0.0], [100.0, 0.0])
    configure(dynamic_sampling=True, advantage="batch_std")
    # Of 1, 0, 0, 0, 4, 0 the mean is 5/6, and the variance (17 - 6 * 25/36) / 5 = 77/30: a deviation of 1.60208.
    assert shown(capsys, "train-0001/0/0") == ("+0.3121", "")
    assert shown(capsys, "train-0001-from-0002/0/1") == ("-1.2483", "")
    assert shown(capsys, "train-0001/1/0") == ("+0.0000", "")
    assert shown(capsys, "train-0001-from-0002/1/0") == ("-", "its group is surplus, played after the batch was full, and isn't trained on")


def test_a_round_of_an_attempt_that_was_given_up_counts_for_nothing(capsys):
    played("train-0001", [1.0, 0.0], [2.0, 0.0])
    played("train-0001-from-0001", [9.0, 0.0])
    configure(dynamic_sampling=True, advantage="batch_std")
    # Of 1, 0, 2, 0 the mean is 3/4, and the variance (5 - 4 * 9/16) / 3 = 11/12: a deviation of 0.95743.
    assert shown(capsys, "train-0001/0/0") == ("+0.5222", "")
    advantage, reason = shown(capsys, "train-0001-from-0001/0/0")
    assert (advantage, reason.rpartition(": ")[2]) == ("-", "a round that was begun before the run was stopped")


def test_an_advantage_that_needs_what_is_not_there_is_not_known(capsys):
    played("train-0001", [1.0, 0.0])
    configure(advantage="batch_std")
    assert shown(capsys, "train-0001/0/0") == ("-", "it can't be known: the episodes of its batch aren't all in the journals")
    configure(advantage="group_mean")
    assert shown(capsys, "train-0001/0/0") == ("+0.5000", "")
    configure(advantage="group_mean", group_size=3)
    assert shown(capsys, "train-0001/0/0") == ("-", "it can't be known: the episodes of its group aren't all in the journals")


def test_a_round_that_was_only_begun_is_not_an_error(capsys):
    played("train-0001", [1.0, 0.0], [0.0, 0.0])
    Path("run/episodes/train-0001-from-0002.jsonl").touch()
    configure(dynamic_sampling=True)
    advantage, reason = shown(capsys, "train-0001/0/0")
    assert advantage == "-"
    assert reason == "it can't be known: the episodes of its batch aren't all in the journals"


def test_a_scenario_that_was_played_twice_makes_two_groups(capsys):
    played("train-0001", [1.0, 0.0], [5.0, 3.0], scenarios=["s", "s"])
    configure(advantage="group_mean")
    assert [shown(capsys, f"train-0001/{place}/0")[0] for place in (0, 1)] == ["+0.5000", "+1.0000"]


def test_settings_that_cannot_be_read_are_not_guessed(journal, capsys):
    Path("run/config.yaml").write_text("format: from another time\n")
    lines = printed(capsys, "episodes", "show", str(journal))
    told = [line for line in lines if "no advantage" in line]
    assert len(told) == 1
    assert told[0].startswith("no advantage: it can't be known, since the run's settings can't be read: ")


def test_a_journal_that_grows_while_it_is_read():
    first, second, third = (episode(member, turn([5], [6])) for member in (0, 1, 2))
    reading = _journals.latest(write(first, second))
    assert next(reading).id == first.id
    write(third)
    assert [found.id for found in reading] == [second.id]


def test_realigned_sequences_need_the_tokenizer(capsys):
    played("train-0001", [1.0, 0.0])
    configure(realign=True)
    lines = printed(capsys, "episodes", "show", FILE)
    assert "the run realigns context, which takes its tokenizer to show: give --tokenizer smollm2-135m" in lines


@pytest.mark.parametrize("name", ["train-0001/t/0", "train-0001/s/2"])
def test_an_episode_without_others_to_compare_has_no_advantage(journal, capsys, name):
    lines = printed(capsys, "episodes", "show", journal, "--episode", name)
    assert not any("+0.0" in line for line in lines)
    if name.endswith("t/0"):
        assert "turn 0: reward +0, advantage -, stop, 1 invalid calls" in lines
        assert "       1  sampled        6    -0.5000          -" in lines
    else:
        assert "failure      gone" in lines


def test_forks_are_shown_with_their_cause(capsys):
    lines = printed(capsys, "episodes", "show", write(episode(0, turn([1], [2]), turn([1, 8, 3], [4]))))
    assert [line for line in lines if line.startswith("sequence")] == [
        "sequence 1 of 2: 2 tokens, 1 sampled",
        "sequence 2 of 2, a fork: sampled_tokens: 4 tokens, 1 sampled",
    ]


def test_a_turn_that_sampled_nothing_is_told_of(capsys):
    lines = printed(capsys, "episodes", "show", write(episode(0, turn([1], []), turn([1, 2], [3]), turn([1, 2, 3, 4], []))))
    assert [line for line in lines if line.startswith("turn")] == [
        "turn 0: reward +0, advantage -, stop, nothing sampled",
        "turn 1: reward +0, advantage -, stop",
        "turn 2: reward +0, advantage -, stop, nothing sampled",
    ]


def test_an_episode_without_tokens_is_shown_by_its_messages(capsys):
    lines = printed(capsys, "episodes", "show", write(episode(0, turn(None, None))))
    assert any(line.startswith("its tokens weren't recorded: turn 0 of episode train-0001/s/0") for line in lines)
    assert lines[-3:] == ["user: Go on.", "turn 0: reward +0, advantage -, stop", "assistant: look({})"]


def test_what_a_model_wrote_does_not_reach_the_terminal_raw(capsys):
    evil = episode(0, turn(None, None))
    evil.turns[0].action = {"role": "assistant", "content": "\x1b[2Jgone\ud800"}
    assert printed(capsys, "episodes", "show", write(evil))[-1] == "assistant: \\x1b[2Jgone?"


def test_a_terminal_gets_colours(journal, capsys, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(_episodes, "Console", lambda **options: Console(file=screen, force_terminal=True, color_system="standard", **options))
    printed(capsys, "episodes", "show", journal)
    assert "\x1b[" in screen.getvalue()


@pytest.mark.train
def test_with_a_tokenizer_tokens_are_shown_as_text(capsys, tiny_model):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    prompt, reply = tokenizer.encode("<|im_start|>assistant\n"), tokenizer.encode("Hello<|im_end|>")
    journal = write(episode(0, turn(prompt, reply), turn([*prompt, *tokenizer.encode("Bye<|im_end|>")], reply)))
    lines = printed(capsys, "episodes", "show", journal, "--tokenizer", tiny_model)
    assert lines[9] == f"sequence 1 of 2: {len(prompt) + len(reply)} tokens, {len(reply)} sampled"
    shown = [line.rpartition("  ")[2] for line in lines[11:] if "sampled  " in line or "context  " in line][: len(prompt) + len(reply)]
    assert shown[0] == "'<|im_start|>'"
    assert shown[-2:] == ["'Hello'", "'<|im_end|>'"]
    assert "".join(text[1:-1] for text in shown) == "<|im_start|>assistant\\nHello<|im_end|>"
    assert any(line.startswith("sequence 2 of 2, a fork: history") for line in lines)


@pytest.mark.train
def test_a_run_that_realigns_is_shown_realigned(capsys, tiny_model):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    prompt, reply = tokenizer.encode("assistant\n"), tokenizer.encode("Hello<|im_end|>")
    spelled = [token for letter in "assistant\n" for token in tokenizer.encode(letter)]
    assert spelled != prompt
    journal = write(episode(0, turn(prompt, reply), turn([*spelled, *reply, *prompt], reply)))
    configure()
    assert any(line.startswith("sequence 2 of 2") for line in printed(capsys, "episodes", "show", journal, "--tokenizer", tiny_model))
    configure(realign=True)
    count = 2 * (len(prompt) + len(reply))
    assert f"sequence 1 of 1, 1 turns realigned: {count} tokens, {2 * len(reply)} sampled" in printed(
        capsys, "episodes", "show", journal, "--tokenizer", tiny_model
    )


def test_a_journal_that_is_not_there(refused):
    assert refused("episodes", "ls", "nowhere.jsonl") == "there is no file nowhere.jsonl; a run's journals are in its folder episodes/"
    assert refused("episodes", "show", "nowhere.jsonl") == "there is no file nowhere.jsonl; a run's journals are in its folder episodes/"


def test_a_folder_instead_of_a_journal(refused, journal):
    assert refused("episodes", "show", "run") == "run is a folder; give one of its journals: train-0001.jsonl"
    Path("empty").mkdir()
    assert refused("episodes", "show", "empty") == "empty is a folder; give a journal, such as train-0001.jsonl"


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe\x00", b'{"torn": ', b"no JSON\n"])
def test_a_file_without_an_episode(refused, content):
    Path("file.jsonl").write_bytes(content)
    assert "file.jsonl" in refused("episodes", "ls", "file.jsonl")
    assert "file.jsonl" in refused("episodes", "show", "file.jsonl")


@pytest.mark.parametrize("content", [b"no JSON\n{}\n", b'{"some": "thing"}\n', b"[1, 2]\n", b"null\n"])
def test_a_file_of_something_else(refused, content):
    Path("file.jsonl").write_bytes(content)
    line = refused("episodes", "show", "file.jsonl")
    assert line.startswith("file.jsonl, line 1 ")
    assert line.endswith("; give a journal of episodes, as a run writes them")


def test_an_unknown_episode(refused, journal):
    assert refused("episodes", "show", str(journal), "--episode", "train-9") == (
        f"{journal} holds no episode 'train-9'; it holds train-0001/s/0, train-0001/s/1, train-0001/s/2… (art-gym episodes ls {journal})"
    )


@pytest.mark.train
def test_an_unknown_tokenizer(refused, journal, monkeypatch):
    pytest.importorskip("transformers")
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    Path("folder").mkdir()
    for name in ("folder", "no-such/model"):
        line = refused("episodes", "show", str(journal), "--tokenizer", name)
        assert line.startswith(f"--tokenizer {name}: no tokenizer there (")
        assert line.endswith("; give smollm2-135m, a model's folder or a hub id")


def test_a_path_is_not_asked_of_the_hub(refused, journal, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr("socket.getaddrinfo", lambda *args, **kwargs: pytest.fail("the network was asked"))
    line = refused("episodes", "show", str(journal), "--tokenizer", "./nowhere")
    assert line.startswith("--tokenizer ./nowhere: no such folder; give a folder with")


@pytest.mark.slow
def test_without_a_tokenizer_it_loads_neither_torch_nor_transformers(journal):
    program = f"""
import sys
from art_gym.cli import main
assert main(["episodes", "show", {str(journal)!r}]) == 0
assert not {{"torch", "transformers"}} & set(sys.modules), "loaded"
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_without_a_word_it_tells_what_there_is(capsys):
    lines = printed(capsys, "episodes")
    assert any(line.split()[1:2] == ["ls"] for line in lines)
    assert any(line.split()[1:2] == ["show"] for line in lines)
    assert any(line.split()[1:2] == ["export"] for line in lines)


def test_an_unknown_subcommand(refused):
    assert refused("episodes", "look") == "No such command 'look'."
