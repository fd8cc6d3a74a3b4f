"""Whatever an endpoint answers, there is a reply or a policy error; and whatever is asked arrives."""

import copy
import json
from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from art_gym.errors import PolicyError
from art_gym.rollout import Reply
from art_gym_agents._completion import decode
from art_gym_agents.chat import _encode, _reply

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=10), children, max_size=4),
    max_leaves=10,
)
SOUND = {
    "model": "served",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": None,
                "reasoning": "I think.",
                "tool_calls": [{"id": "a", "type": "function", "function": {"name": "guess", "arguments": "{}"}}],
            },
            "logprobs": {"content": [{"token": "t", "logprob": -0.5, "bytes": [116], "top_logprobs": []}]},
            "finish_reason": "stop",
            "token_ids": [7],
        }
    ],
    "prompt_token_ids": [1, 2],
}


def places(value, path=()):
    """Paths to everything inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


@st.composite
def spoiled_completions(draw):
    """A sound completion with something else, or nothing, in some of its places."""
    answer = copy.deepcopy(SOUND)
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from([*places(answer)] or [("model",)]))
        parent = answer
        for key in path:
            parent = parent[key]
        if draw(st.booleans()):
            parent[last] = draw(JSON)
        elif isinstance(parent, list) or last in parent:
            del parent[last]
    return answer


def read(answer):
    with suppress(PolicyError):
        reply = _reply(decode("http://127.0.0.1:8000/v1/chat/completions", answer))
        assert isinstance(reply, Reply)
        assert reply.action["role"] == "assistant"
        assert reply.logprobs is None or all(isinstance(value, float) for value in reply.logprobs)
        assert isinstance(reply.finish_reason, str)


def test_the_sound_one_is_read():
    reply = _reply(decode("", json.dumps(SOUND).encode()))
    assert (reply.prompt_ids, reply.completion_ids, reply.logprobs, reply.policy) == ([1, 2], [7], [-0.5], "served")


@given(JSON | spoiled_completions())
def test_any_json_is_a_reply_or_a_policy_error(answer):
    read(json.dumps(answer).encode())


@given(
    st.binary()
    | st.tuples(st.just(json.dumps(SOUND).encode()), st.integers(0, 500), st.binary(max_size=5)).map(
        lambda t: t[0][: t[1]] + t[2] + t[0][t[1] + 1 :]
    )
)
def test_any_bytes_are_a_reply_or_a_policy_error(answer):
    read(answer)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters() | st.just("\ud83d")),
        lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=10), children, max_size=4),
        max_leaves=10,
    )
)
def test_what_is_sent_says_what_was_to_be_said(value):
    assert json.loads(_encode({"messages": value})) == {"messages": value}
