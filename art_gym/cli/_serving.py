"""The serving side of a training run: the engine, the agent that plays through it, and how a new policy gets there.

What is trained and when is `art_gym.cli._train`'s business; how a publish works and is proven, `art_gym_trainers.publish`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from peft import PeftModel

from art_gym.cli.config import RunConfig
from art_gym.cli.live import LiveTable
from art_gym.cli.preflight import attached_engine, policy_engine, publishes_adapters
from art_gym.engine import AttachedEngine, Engine
from art_gym_agents import ChatAgent
from art_gym_trainers.publish import LoraPublisher, MergedPublisher, Probe, Published, Publisher, prepare_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBE_TOKENS = 256
"""How much of an episode proves a publish: enough to tell two versions apart, and a fraction of a second to score."""


class Serving:
    """Serves the policy of a run, version after version.

    Args:
        config: The run's configuration.
        folder: The run's folder: the engine's log and, by publisher, `weights/` or `adapters/` go there.
        model_folder: The base model.
        name: The policy's name; version 3 is `name@3`.
        live: Shows what goes on.

    Attributes:
        engine: Not started yet.
    """

    def __init__(self, config: RunConfig, folder: Path, model_folder: Path, name: str, live: LiveTable) -> None:
        self._config, self._folder, self._name, self._live = config, folder, name, live
        self.engine = self._attached() if config.engine.attach else self._launched(model_folder)
        self._publisher: Publisher | None = None
        self._published: tuple[int, Published] | None = None

    def agent(self) -> ChatAgent:
        """The agent that plays; each publish moves it to the new version. The engine has to run."""
        rollout = self._config.rollout
        self._agent = ChatAgent(
            self.engine.base_url,
            self.engine.model,
            temperature=rollout.temperature,
            max_tokens=rollout.max_tokens,
            api_key=self.engine.api_key,
            version=f"{self._name}@untrained",
            name=self._name,
        )
        return self._agent

    def publish(self, step: int, policy: PeftModel | PreTrainedModel, probe_tokens: Sequence[int]) -> Published:
        """Put the policy into the engine as version `step`, prove it on the tokens, and let the agent play it; done already, it stands.

        Raises:
            EngineError: The engine refused it, or answers with other weights.
        """
        if self._published is not None and self._published[0] == step:
            return self._published[1]
        self._live.phase("publish", f"version {step}")
        if self._publisher is None:
            self._publisher = self._make_publisher(policy, probe_tokens)
        published = self._publisher.publish(step)
        self._published = step, published
        self._agent.model, self._agent.version = published.model, published.version
        return published

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """On one shared GPU the engine gives its memory back while the trainer works."""
        shared = isinstance(self.engine, Engine) and self.engine.config.enable_sleep
        if shared:
            self.engine.sleep()
        try:
            yield
        finally:
            if shared:
                self.engine.wake()

    def _attached(self) -> AttachedEngine:
        self._lora = True
        return attached_engine(self._config.engine)

    def _launched(self, model_folder: Path) -> Engine:
        self._lora = publishes_adapters(self._config)
        # Without adapters the engine reads a folder of the run's own, which each publish writes over. A run that goes on publishes before
        # it plays.
        folder = model_folder if self._lora else self._folder / "weights"
        config = policy_engine(self._config, folder, self._name, adapters=self._lora)
        config = config.model_copy(update={"enable_sleep": config.resolved_device() == "cuda"})
        if not self._lora:
            prepare_weights(model_folder, folder, config.dtype)
        return Engine(config, log=self._folder / "engine.log", progress=lambda line: self._live.phase("engine", line))

    def _make_publisher(self, policy: PeftModel | PreTrainedModel, probe_tokens: Sequence[int]) -> Publisher:
        dtype = self.engine.config.dtype if isinstance(self.engine, Engine) else "auto"
        # In bfloat16 rare tokens are off by several hundredths of a nat.
        exact = self._config.model.dtype == dtype == "float32"
        # The engine's base isn't of 4 bits.
        rough = 0.5 if self._config.model.method == "qlora" else 0.15
        probe = Probe(probe_tokens[:_PROBE_TOKENS], tolerance=0.01 if exact else rough)
        if self._lora and isinstance(policy, PeftModel):
            return LoraPublisher(policy, self.engine, self._folder / "adapters", self._name, probe)
        return MergedPublisher(policy, self.engine, self._folder / "weights", self.engine.model, probe, dtype)
