"""Play an environment with a trained adapter in plain transformers and PEFT: no vLLM, no engine, nothing of the training run but its adapter.

    python examples/play_with_peft.py runs/Lookup-v0-seed0/checkpoints/step-0010 --env topics=2 --n 50

It shows two things: that what `art-gym train` leaves behind loads anywhere, and that an agent is one small class.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import art_gym
from art_gym import Reply, Runner, TurnState
from art_gym.messages import AssistantMessage
from art_gym.rollout.progress import show_progress
from art_gym.statistics import wilson
from art_gym_trainers.models import resolve

CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


class PeftAgent:
    """Samples replies with transformers, a batch at a time: those of all the episodes that are waiting."""

    name = "transformers + PEFT"

    def __init__(self, base: Path, adapter: Path, *, max_tokens: int = 40, temperature: float = 1.0) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self.model = PeftModel.from_pretrained(model, adapter).eval()
        self.options: dict[str, Any] = {
            "max_new_tokens": max_tokens,
            "do_sample": True,
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": 0,
            "eos_token_id": self.tokenizer.eos_token_id,
            "pad_token_id": self.tokenizer.pad_token_id,
        }
        self._waiting: list[tuple[str, asyncio.Future[str]]] = []

    async def act(self, state: TurnState) -> Reply:
        prompt = self.tokenizer.apply_chat_template(state.messages, tools=state.tools, add_generation_prompt=True, tokenize=False)
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append((prompt, future))
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._answer)
        return Reply(parse(await future))

    async def close(self) -> None:
        """Nothing is held open."""

    def _answer(self) -> None:
        waiting, self._waiting = self._waiting, []
        batch = self.tokenizer([prompt for prompt, _ in waiting], return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.inference_mode():
            tokens = self.model.generate(**batch, **self.options)
        for (_, future), row in zip(waiting, tokens[:, batch["input_ids"].shape[1] :], strict=True):
            future.set_result(self.tokenizer.decode(row, skip_special_tokens=True))


def parse(text: str) -> AssistantMessage:
    r"""Read hermes tool calls out of a reply.

    >>> parse('<tool_call>\n{"name": "search", "arguments": {"word": "Ana"}}\n</tool_call>')["tool_calls"][0]["function"]["name"]
    'search'
    >>> parse("I don't know.")
    {'role': 'assistant', 'content': "I don't know."}
    """
    try:
        found = [json.loads(call) for call in CALL.findall(text)]
        named = [(call["name"], call["arguments"]) for call in found]
    except (ValueError, KeyError, TypeError):
        named = []
    return art_gym.calls(*named) if named else art_gym.say(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", type=Path, help="a checkpoint folder of a run")
    parser.add_argument("--env-id", default="art_gym/Lookup-v0")
    parser.add_argument("--env", action="append", default=[], metavar="KEY=NUMBER", help="an argument of the environment; may be repeated")
    parser.add_argument("--model", default="smollm2-135m", help="the base model that the adapter was trained on")
    parser.add_argument("--n", type=int, default=50, help="how many scenarios of the test split")
    arguments = parser.parse_args()

    agent = PeftAgent(resolve(arguments.model), arguments.adapter)
    kwargs = {key: int(value) for key, _, value in (pair.partition("=") for pair in arguments.env)}
    env = cast("art_gym.ToolEnv", art_gym.make(arguments.env_id, **kwargs).unwrapped)
    scenarios = list(islice(env.scenarios("test"), arguments.n))
    runner = Runner(arguments.env_id, agent, env_kwargs=kwargs, concurrency=32, turn_timeout=600.0, episode_timeout=3600.0)
    with show_progress("playing", len(scenarios)) as progress:
        episodes = [group.episodes[0] for group in runner.collect(scenarios, progress=progress)]
    successes = sum(episode.success for episode in episodes)
    low, high = wilson(successes, len(episodes))
    print(f"{agent.name}: {successes / len(episodes):.1%} of {len(episodes)} (95% interval {low:.1%} to {high:.1%})")


if __name__ == "__main__":
    main()
