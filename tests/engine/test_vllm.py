"""A real vLLM: exact tokens over turns, control calls, death.

The model is tiny and random. What a test needs it to say, it is made to sample: a grammar allows one text, and biases favour long tokens in it.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from art_gym.engine import Engine, EngineConfig
from art_gym.engine._http import request
from art_gym.errors import EngineError, UsageError

pytestmark = [pytest.mark.vllm, pytest.mark.train, pytest.mark.timeout(600)]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "guess",
            "description": "Guess the number.",
            "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
        },
    }
]
CALL = '<tool_call>\n{"name": "guess", "arguments": {"number": 12}}\n</tool_call>'
ANSWERS = {
    "call": CALL,
    "two": CALL + "\n" + CALL.replace("12", "7"),
    "both": "I take twelve.\n" + CALL,
    "text": "The number is twelve, isn't it? Été 🤖.",
    "empty": "",
    "broken": '<tool_call>\n{"name": "guess", "arguments": {"number": 12}\n</tool_call>',
    "nested": '<tool_call>\n{"name": "guess", "arguments": {"a": {"b": [1, 2.5, null, true]}, "c": "é\\"\\n"}}\n</tool_call>',
}


def messages_for(kind: str) -> list[dict]:
    return [{"role": "system", "content": "Play."}, {"role": "user", "content": kind}]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory):
    config = EngineConfig(model=str(tiny_model), dtype="float32", max_model_len=512, kv_cache_gib=0.25, max_num_seqs=8)
    with Engine(config, log=tmp_path_factory.mktemp("engine") / "engine.log") as engine:
        yield engine


def chat(engine: Engine, messages: list[dict], **options) -> dict:
    body = {"model": engine.model, "messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 64, "logprobs": True}
    return request(f"{engine.base_url}/chat/completions", {**body, "return_token_ids": True, **options}, timeout=60)


def said(engine: Engine, tokenizer, kind: str, **options) -> dict:
    """The response in which the model says the answer of that kind."""
    tokens = tokenizer(ANSWERS[kind] + "<|im_end|>", add_special_tokens=False)["input_ids"]
    forced = {"structured_outputs": {"choice": [ANSWERS[kind]]}} if ANSWERS[kind] else {"allowed_token_ids": tokens}
    bias = {str(token): min(10 * len(tokenizer.convert_ids_to_tokens(token)), 100) for token in tokens}
    response = chat(engine, messages_for(kind), logit_bias=bias, **forced, **options)
    assert response["choices"][0]["token_ids"] == tokens[: options.get("max_tokens")]
    return response


def as_history(message: dict) -> dict:
    return {key: message[key] for key in ("role", "content", "tool_calls") if message.get(key) is not None}


@pytest.mark.parametrize("kind", ANSWERS)
def test_the_next_prompt_extends_what_was_sampled(engine: Engine, tokenizer, kind: str):
    first = said(engine, tokenizer, kind)
    choice = first["choices"][0]
    calls = choice["message"].get("tool_calls") or []
    assert len(calls) == {"call": 1, "two": 2, "both": 1, "nested": 1}.get(kind, 0)
    if not calls:
        assert (choice["message"]["content"] or "") == ANSWERS[kind]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])

    replies = [{"role": "tool", "tool_call_id": call["id"], "content": "Higher."} for call in calls] or [{"role": "user", "content": "Go on."}]
    second = chat(engine, [*messages_for(kind), as_history(choice["message"]), *replies], max_tokens=1)
    so_far = first["prompt_token_ids"] + choice["token_ids"]
    assert second["prompt_token_ids"][: len(so_far)] == so_far


@pytest.mark.parametrize(("kind", "max_tokens"), [("text", 4), ("call", 9), ("broken", 20)])
def test_the_next_prompt_extends_a_completion_cut_at_its_length(engine: Engine, tokenizer, kind: str, max_tokens: int):
    first = said(engine, tokenizer, kind, max_tokens=max_tokens)
    choice = first["choices"][0]
    assert choice["finish_reason"] == "length"
    second = chat(engine, [*messages_for(kind), as_history(choice["message"]), {"role": "user", "content": "Go on."}], max_tokens=1)
    so_far = first["prompt_token_ids"] + choice["token_ids"]
    assert second["prompt_token_ids"][: len(so_far)] == so_far


def test_null_and_empty_content_are_the_same_tokens(engine: Engine):
    calls = [{"id": "c", "type": "function", "function": {"name": "guess", "arguments": '{"number": 1}'}}]
    prompts = [
        chat(engine, [*messages_for("call"), {"role": "assistant", **content, "tool_calls": calls}], max_tokens=1)["prompt_token_ids"]
        for content in ({"content": None}, {"content": ""}, {})
    ]
    assert prompts[0] == prompts[1] == prompts[2]


def reference_logprobs(folder: Path, ids: list[int]) -> list[float]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [logprobs[index, token].item() for index, token in enumerate(ids[1:])]


def test_prompt_logprobs_are_those_of_transformers(engine: Engine, tiny_model: Path):
    ids = chat(engine, messages_for("call"), max_tokens=1)["prompt_token_ids"]
    assert engine.prompt_logprobs(ids) == pytest.approx(reference_logprobs(tiny_model, ids), abs=1e-3)


def test_reload_weights_serves_the_new_ones_at_once(engine: Engine, tiny_model: Path, tmp_path: Path):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(100.0)
        model.model.norm.weight.mul_(3.0)
    model.save_pretrained(tmp_path)
    ids = chat(engine, messages_for("call"), max_tokens=1)["prompt_token_ids"]
    old, new = (reference_logprobs(folder, ids) for folder in (tiny_model, tmp_path))
    assert old != pytest.approx(new, abs=0.1)
    try:
        engine.reload_weights(tmp_path)
        assert engine.prompt_logprobs(ids) == pytest.approx(new, abs=1e-3)
    finally:
        engine.reload_weights(tiny_model)
    assert engine.prompt_logprobs(ids) == pytest.approx(old, abs=1e-3)


def test_what_the_server_was_not_started_with_is_named(engine: Engine):
    with pytest.raises(UsageError, match="enable_lora"):
        engine.load_adapter("a", "/a")


def test_an_unknown_model_is_told(engine: Engine):
    with pytest.raises(EngineError, match="`nobody` does not exist"):
        engine.prompt_logprobs([1, 2, 3], model="nobody")


def test_the_death_of_a_worker_is_noticed_and_leaves_no_process(engine: Engine):
    """The last test on this engine: it doesn't survive."""
    family = descendants(engine._supervisor.pid)
    core = next(pid for pid in family if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(core, signal.SIGKILL)
    assert engine.died.wait(15)
    with pytest.raises(EngineError, match="the inference engine died"):
        engine.check()
    assert gone(family)


def test_a_folder_that_is_no_language_model_is_told_with_the_servers_reason(tiny_model: Path, tmp_path: Path):
    folder = shutil.copytree(tiny_model, tmp_path / "odd")
    (folder / "config.json").write_text(json.dumps({"architectures": ["NoSuchModel"], "model_type": "no-such-type"}))
    with pytest.raises(EngineError) as caught:
        Engine(EngineConfig(model=str(folder), kv_cache_gib=0.25), log=tmp_path / "log").start()
    assert "died while starting (exit code 1): " in str(caught.value)
    assert "no-such-type" in str(caught.value).splitlines()[0]


def test_nothing_is_left_of_vllm_when_the_parent_is_killed(tiny_model: Path, tmp_path: Path):
    script = textwrap.dedent("""
        import sys, time
        from art_gym.engine import Engine, EngineConfig
        with Engine(EngineConfig(model=sys.argv[1], kv_cache_gib=0.25, max_model_len=512), log=sys.argv[2]) as engine:
            print(engine._supervisor.pid, flush=True)
            time.sleep(600)
    """)
    command = [sys.executable, "-c", script, str(tiny_model), str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        supervisor = int(parent.stdout.readline())
        family = [supervisor, *descendants(supervisor)]
        assert len(family) >= 4  # supervisor, API server, engine core, worker
        parent.kill()
        assert gone(family)


def descendants(root: int) -> list[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, waiting = [], [root]
    while waiting:
        parent = waiting.pop()
        children = [pid for pid, of in parents.items() if of == parent]
        found += children
        waiting += children
    return found


def gone(pids: list[int], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text() for pid in pids):
            return True
        time.sleep(0.1)
    return False
