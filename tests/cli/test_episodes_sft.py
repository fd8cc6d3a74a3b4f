"""`art-gym episodes export --format sft`: conversations that chat templates render right, and that learn each turn once."""

import json
from pathlib import Path

import pytest

from art_gym import Runner, Scenario, call, calls, say
from art_gym.cli import main
from art_gym.episodes import Episode, Failure, Turn
from art_gym.rollout import Reply, branch_at
from art_gym.store import EpisodeStore

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

GO = {"role": "user", "content": "Go on."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"To {name}.",
            "parameters": {"type": "object", "properties": {given: {"type": kind, "description": f"The {given}."}}, "required": [given]},
        },
    }
    for name, given, kind in (("guess", "number", "integer"), ("find", "name", "string"))
]


def answer(text: str, call_id: str = "call_0"):
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def written(name: str, arguments) -> dict:
    """An action whose arguments are written just so."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "call_0", "type": "function", "function": function}]}


def asked(name: str, /, **arguments) -> dict:
    """What is to be exported for a call."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "call_0", "type": "function", "function": function}]}


def episode(id: str, *actions, first=GO, **details) -> Episode:
    turns = [Turn([first if index == 0 else answer("Äh.")], action, reward=1.0) for index, action in enumerate(actions)]
    details = {"tools": TOOLS, "terminated": "failure" not in details, "final_observation": [answer("Done.")], **details}
    return Episode(id, "x/Y-v0", Scenario("s", 3), turns=turns, **details)


def export(capsys, *episodes: Episode, options=()) -> tuple[list[dict], str]:
    """The conversations, and the line that was printed."""
    with EpisodeStore("run") as store:
        store.journal("train-0001").append(*episodes)
    assert main(["episodes", "export", "run", "--to", "out.jsonl", "--format", "sft", *options]) == 0
    return [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()], capsys.readouterr().out.rstrip()


def test_a_conversation_ends_with_the_last_action_and_is_learnt_from_the_first(capsys):
    won = episode("a", call("guess", number=3), call("find", name="Äh"))
    won.turns[1].observation = [answer("Äh \ud800")]
    ((found,), line) = export(capsys, won)
    assert line == "1 episodes in out.jsonl"
    assert found["prompt"] == [GO]
    assert found["completion"] == [asked("guess", number=3), answer("Äh ?"), asked("find", name="Äh")]
    assert json.loads(found["tools"]) == TOOLS


def test_arguments_are_objects_whatever_they_hold_and_however_they_were_written(capsys):
    deep = {"a": {"b": [1, 2.5, None, True, "ü"]}, "z": {}, "b": 10**30}
    actions = [calls(("guess", deep), ("find", {})), written("find", ""), written("find", None), written("guess", {"number": 3}), say("Done.")]
    ((found,), _) = export(capsys, episode("a", *actions))
    said = [message for message in found["completion"] if message["role"] == "assistant"]
    told = [[call["function"]["arguments"] for call in message.get("tool_calls", [])] for message in said]
    assert told == [[deep, {}], [{}], [{}], [{"number": 3}], []]
    assert list(told[0][0]) == ["a", "z", "b"]
    assert said[-1] == say("Done.")


def test_keys_that_hold_nothing_are_left_out_since_templates_take_them_for_something(capsys):
    action = {**say("Hm."), "tool_calls": None, "refusal": None, "reasoning_content": "Well…"}
    ((found,), _) = export(capsys, episode("a", action, {**say("So."), "tool_calls": []}, tools=[]))
    assert found["completion"] == [{**say("Hm."), "reasoning_content": "Well…"}, answer("Äh."), say("So.")]
    assert found["tools"] is None


@pytest.mark.parametrize(
    "broken",
    [
        written("guess", '{"number": 3'),
        written("guess", "[3]"),
        written("guess", '"3"'),
        written("guess", '{"number": NaN}'),
        written("guess", '{"number": 1, "number": 2}'),
        written("guess", '{"name": "\\ud800"}'),
        {"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]},
        {"role": "assistant", "content": None, "tool_calls": "guess(3)"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "type": "custom", "custom": {"name": "guess", "input": "3"}}]},
    ],
)
def test_an_episode_with_a_call_that_is_none_is_left_out_and_counted(capsys, broken):
    good = call("guess", number=3)
    found, line = export(capsys, episode("a", good, broken, good), episode("b", good), episode("c", good, broken))
    assert line == "1 episodes in out.jsonl; of the others 2 have calls that aren't JSON objects"
    assert [one["completion"] for one in found] == [[asked("guess", number=3)]]


def test_what_cannot_be_learnt_from_is_left_out_and_counted_by_reason(capsys):
    good = call("guess", number=3)
    silent = episode("d", good)
    silent.turns[0].observation = []
    unfinished = [episode("a", good, failure=Failure("policy", "gone")), episode("b")]
    found, line = export(capsys, *unfinished, silent, episode("e", good))
    assert (len(found), line) == (1, "1 episodes in out.jsonl; of the others 2 aren't finished, 1 begin without a message")


# ------------------------------------------------------------------------------------------ branches


def branch(parent: Episode, number: int, shared: int, *actions, **details) -> Episode:
    child = episode(f"{parent.id}~{number}", *[turn.action for turn in parent.turns[:shared]], *actions, **details)
    child.parent, child.shared_turns = parent.id, shared
    parent.branches.append(shared)
    return child


def guess(number: int):
    return call("guess", number=number)


def learnt(conversations) -> list[list[int]]:
    """The guesses in each completion."""
    return [
        [made["function"]["arguments"]["number"] for message in found["completion"] for made in message.get("tool_calls", [])]
        for found in conversations
    ]


def test_a_branch_repeats_the_turns_of_its_parent_in_the_prompt(capsys):
    parent = episode("a", guess(0), guess(1), guess(2))
    child = branch(parent, 0, 2, guess(12), guess(13))
    found, _ = export(capsys, parent, child)
    assert learnt(found) == [[0, 1, 2], [12, 13]]
    assert found[1]["prompt"] == [GO, asked("guess", number=0), answer("Äh."), asked("guess", number=1), answer("Äh.")]


def test_a_tree_is_learnt_once_whichever_comes_first(capsys):
    root = episode("a", guess(0), guess(1), guess(2), guess(3))
    first, second = branch(root, 0, 1, guess(11), guess(12), guess(13)), branch(root, 1, 3, guess(23))
    inner = branch(first, 0, 2, guess(32))
    # The innermost ended first, and then the others inwards.
    found, _ = export(capsys, inner, second, root, first)
    assert learnt(found) == [[0, 11, 32], [1, 2, 23], [3], [12, 13]]


def test_what_a_failed_parent_sampled_is_learnt_in_the_first_of_its_branches(capsys):
    root = episode("a", guess(0), guess(1), failure=Failure("policy", "gone"))
    found, _ = export(capsys, branch(root, 0, 2, guess(12)), root, branch(root, 1, 1, guess(21)))
    assert learnt(found) == [[0, 1, 12], [21]]


def test_what_only_failures_or_other_labels_hold_is_not_taken_for_learnt(capsys):
    lost = episode("a", guess(0), guess(1))
    child = branch(lost, 0, 1, guess(11))
    for turn in lost.turns:
        turn.reward = -1.0
    with EpisodeStore("run") as store:
        # Another label, of which an export has the same name.
        store.journal("train-0000").append(episode("a", guess(0), guess(1)))
    found, line = export(capsys, lost, child, options=["--successful"])
    assert (learnt(found), line) == ([[0, 1], [0, 11]], "2 episodes in out.jsonl; of the others 1 aren't a success")


class Counting:
    """Guesses a number of its own at each turn, with tokens that tell the turn."""

    name = "counting"

    def __init__(self) -> None:
        self.sampled = 0

    async def act(self, state):
        self.sampled += 1
        return Reply(guess(self.sampled), prompt_ids=[1], completion_ids=[self.sampled], logprobs=[-1.0])

    async def close(self):
        pass


@pytest.fixture
def branched():
    """How often an agent was asked in a rollout with branches that is on disk."""
    agent = Counting()
    with EpisodeStore("run") as store:
        Runner("art_gym/GuessNumber-v0", agent, branch=branch_at({1: 2})).collect([Scenario("game", 3)], journal=store.journal("train-0001"))
        assert any(episode.parent for episode in store.read())
    return agent.sampled


def test_each_turn_of_a_branched_rollout_is_learnt_once(branched, capsys):
    found, _ = export(capsys)
    assert sorted(number for numbers in learnt(found) for number in numbers) == list(range(1, branched + 1))


def test_the_documented_query_counts_what_a_branched_rollout_sampled_once(branched):
    duckdb = pytest.importorskip("duckdb")
    with EpisodeStore("run") as store:
        store.compact()
    page = (Path(__file__).parents[2] / "docs" / "episodes.md").read_text()
    query = page.split("```sql\n")[1].split(";")[0].replace("runs/*/", "run/")
    ((_, tokens, logprob),) = duckdb.sql(query).fetchall()
    assert (tokens, logprob) == (branched, -1.0)


# ---------------------------------------------------------------------------------- templates and TRL


def loaded(path="out.jsonl"):
    """As the documentation says."""
    datasets = pytest.importorskip("datasets")
    message = datasets.List(datasets.Json())
    features = datasets.Features({"prompt": message, "completion": message, "tools": datasets.Value("string")})
    return datasets.load_dataset("json", data_files=path, split="train", features=features, cache_dir="cache")


TEMPLATES = ["qwen2_5", "qwen2_5_training", "qwen3", "qwen3_training", "qwen3_6", "qwen3_vl", "llama3_1", "llama3_2", "gemma4", "gemma4_v5",
             "glm4moe", "gptoss", "lfm2_2_5", "lfm2_v2", "nemotron_3_nano", "deepseekv3_training"]  # fmt: skip


@pytest.mark.train
@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_render_what_was_exported_as_if_it_had_never_been_on_disk(template, capsys):
    """With tools whose parameters differ, which a data set would merge into one table."""
    trl = pytest.importorskip("trl")
    chat = pytest.importorskip("transformers.utils.chat_template_utils")
    compiled = chat._compile_jinja_template((Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja").read_text())

    def rendered(messages, tools) -> str:
        return compiled.render(messages=messages, tools=tools, add_generation_prompt=False, bos_token="", eos_token="")

    export(capsys, episode("a", call("guess", number=3), call("find", name="Ada")), episode("b", say("No."), tools=[]))
    calling, saying = loaded()
    wanted = [GO, asked("guess", number=3), answer("Äh."), asked("find", name="Ada")]
    text = rendered(calling["prompt"] + calling["completion"], json.loads(calling["tools"]))
    assert text == rendered(wanted, TOOLS)
    assert ("number" in text, "Ada" in text, '\\"number' in text, "None" in text, "{{" in text) == (True, True, False, False, False)
    assert rendered(saying["prompt"] + saying["completion"], saying["tools"]) == rendered([GO, say("No.")], None)


@pytest.mark.train
@pytest.mark.parametrize("assistant_only", [False, True])
def test_trl_trains_on_each_turn_once(capsys, tiny_model, assistant_only):
    trl = pytest.importorskip("trl")
    parent = episode("a", guess(100), call("find", name="Ada"), guess(102))
    child = branch(parent, 0, 2, guess(112))
    export(capsys, parent, child)
    settings = trl.SFTConfig("sft", max_steps=1, report_to="none", use_cpu=True, bf16=False, assistant_only_loss=assistant_only)
    trainer = trl.SFTTrainer(str(tiny_model), settings, train_dataset=loaded())
    decode = trainer.processing_class.decode
    whole = [decode(row["input_ids"]) for row in trainer.train_dataset]
    assert all('{"number": 100}' in text and '{"name": "Ada"}' in text for text in whole)
    trained = [decode([token for token in row["labels"] if token != -100]) for row in trainer.train_dataset]
    assert [[part in text for part in ("Go on.", "100", "Ada", "102", "112", "Äh.")] for text in trained] == [
        [False, True, True, True, False, not assistant_only],
        [False, False, False, False, True, False],
    ]
    trainer.train()
