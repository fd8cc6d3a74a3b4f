"""A person at the terminal: what is shown, how a line is read, and how one leaves."""

import asyncio
import io
import json
import threading

import pytest
from rich.console import Console

from art_gym import Runner, Scenario, say
from art_gym.errors import UsageError
from art_gym.spaces import ToolCallSpace
from art_gym_agents.human import HumanAgent, NoActionError, PlayerLeft, read_action, signature

TOOLS = {
    "go": {
        "type": "object",
        "properties": {"to": {"enum": ["north", "south"]}, "steps": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["to"],
        "additionalProperties": False,
    },
    "tell": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"], "additionalProperties": False},
    "look": {"type": "object", "properties": {}, "additionalProperties": False},
}
SPACE = ToolCallSpace(TOOLS)


def named(action):
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in action["tool_calls"]]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("look", ("look", {})),
        ("go to=north", ("go", {"to": "north"})),
        ("go to=north steps=3", ("go", {"to": "north", "steps": 3})),
        ('go {"to": "south", "steps": 2}', ("go", {"to": "south", "steps": 2})),
        ('{"name": "go", "arguments": {"to": "south"}}', ("go", {"to": "south"})),
        ('{"name": "look"}', ("look", {})),
        ('tell text="hello, you"', ("tell", {"text": "hello, you"})),
        # A parameter that takes text gets text, also where it could be a number; and one alone needs no name.
        ("tell text=12", ("tell", {"text": "12"})),
        ("tell hello, you", ("tell", {"text": "hello, you"})),
    ],
)
def test_a_line_that_names_a_tool_is_a_call(line, expected):
    action = read_action(line, SPACE)
    assert named(action) == [expected]
    assert action in SPACE


def test_several_calls_are_a_list_in_json():
    action = read_action('[{"name": "look"}, {"name": "go", "arguments": {"to": "north"}}]', SPACE)
    assert named(action) == [("look", {}), ("go", {"to": "north"})]


@pytest.mark.parametrize("line", ["I give up.", "north", "2 + 2 = 4", "it's"])
def test_any_other_line_is_said(line):
    assert read_action(line, SPACE) == say(line)


def test_what_begins_like_a_call_can_be_said():
    assert read_action(":say look there", SPACE) == say("look there")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("go", 'go needs to: "north" or "south"'),
        ("go to=up", 'to: expected "north" or "south", not "up"'),
        ("go to=north steps=12", "steps: expected integer from 1 to 9, not 12"),
        ("go to=north steps=x", 'steps: expected integer from 1 to 9, not "x"'),
        ("go to=north speed=3", "go takes no 'speed'; it takes: to, steps"),
        ("go north", "'north' has no name: write arg=value"),
        ("go {", "the arguments are no valid JSON"),
        ('tell text="open', "No closing quotation: close what you quote"),
        ("og to=north", "there is no tool 'og'; the tools are: go, tell, look"),
        ('{"name": "go"', "that is no valid JSON"),
        ('{"tool": "go"}', 'a call in JSON is {"name": …, "arguments": {…}}'),
        ("[]", 'a call in JSON is {"name": …, "arguments": {…}}'),
        (":exit", ":exit is no command; these are: :say TEXT, :tools, :help, :quit"),
        (":say", ":say is no command"),
    ],
)
def test_what_no_tool_takes_is_explained(line, problem):
    with pytest.raises(NoActionError) as error:
        read_action(line, SPACE)
    assert problem in str(error.value)


def test_a_limit_that_only_the_whole_schema_knows_is_explained_too():
    space = ToolCallSpace({"pick": {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2}})
    with pytest.raises(NoActionError, match=r"the tool doesn't take that; its signature is pick\(a\?: anything, b\?: anything\)"):
        read_action("pick a=1", space)


def test_a_signature_says_what_each_parameter_takes():
    schema = {
        "properties": {
            "size": {"$ref": "#/$defs/Size"},
            "name": {"anyOf": [{"type": "string", "maxLength": 9}, {"type": "null"}]},
            "share": {"type": "number", "exclusiveMinimum": 0},
        },
        "required": ["size"],
        "$defs": {"Size": {"enum": ["S", "L"]}},
    }
    expected = 'buy(size: "S" or "L", name?: string of at most 9 characters or null, share?: number of more than 0)'
    assert signature("buy", schema) == expected


def typing(*lines: str):
    """A person who types these lines, and then leaves the input at its end."""
    left = list(lines)

    def read() -> str:
        if not left:
            raise EOFError
        return left.pop(0)

    shown = io.StringIO()
    return HumanAgent(read=read, console=Console(file=shown, width=100)), shown


async def test_messages_and_tools_are_shown_and_a_slip_is_asked_again(make_state):
    agent, shown = typing("guess number=99", "", "guess number=3")
    reply = await agent.act(make_state())
    assert named(reply.action) == [("guess", {"number": 3})]
    assert reply.policy == "human"
    text = shown.getvalue()
    assert "guess(number: integer from 1 to 16)" in text
    assert "Begin." in text
    assert "number: expected integer from 1 to 16, not 99" in text
    assert "calls a tool" in text  # an empty line asks for help


async def test_tools_are_shown_once_and_when_asked_for(make_state):
    agent, shown = typing("guess 1", ":tools", "guess 2")
    await agent.act(make_state())
    await agent.act(make_state(turn=1))
    assert shown.getvalue().count("guess(number") == 2


@pytest.mark.parametrize("lines", [(":quit",), (":q",), ()])
async def test_leaving_ends_the_rollout(make_state, lines):
    agent, _ = typing(*lines)
    with pytest.raises(PlayerLeft, match="the player left"):
        await agent.act(make_state())
    assert issubclass(PlayerLeft, UsageError)


async def test_the_loop_lives_while_a_person_thinks(make_state):
    thinking = threading.Event()

    def read() -> str:
        thinking.wait(10)
        return "guess 3"

    agent = HumanAgent(read=read, console=Console(file=io.StringIO()))
    asking = asyncio.create_task(agent.act(make_state()))
    for _ in range(3):
        await asyncio.sleep(0.01)
    assert not asking.done()
    thinking.set()
    assert named((await asking).action) == [("guess", {"number": 3})]


async def test_a_person_who_no_longer_matters_keeps_nothing_waiting(make_state):
    never = threading.Event()
    agent = HumanAgent(read=lambda: str(never.wait(10)), console=Console(file=io.StringIO()))
    asking = asyncio.create_task(agent.act(make_state()))
    await asyncio.sleep(0.01)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "art_gym input")
    never.set()


def test_a_person_plays_episodes():
    agent, shown = typing("guess 1", "guess 2", "guess 1", "guess 2", "guess 1", "guess 2")
    runner = Runner("art_gym/GuessNumber-v0", agent, env_kwargs={"high": 2}, concurrency=1)
    groups = runner.collect([Scenario(f"s{seed}", seed=seed) for seed in range(3)])
    assert all(episode.success for group in groups for episode in group.episodes)
    assert shown.getvalue().count("guess(number: integer from 1 to 2)") == 3
