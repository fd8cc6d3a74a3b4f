"""A stand-in for vLLM, and gateways before it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mock_vllm import MockVLLM, serving

collect_ignore_glob = ["mock_*.py"]


@pytest.fixture
def mock() -> MockVLLM:
    """The stand-in's state; see `upstream` for its address."""
    return MockVLLM()


@pytest.fixture
def upstream(mock: MockVLLM) -> Iterator[str]:
    """The base URL of a running stand-in for vLLM."""
    with serving(mock.app()) as url:
        yield f"{url}/v1"


@pytest.fixture
def make_gateway(upstream: str, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts gateways before the stand-in, with the settings given; returns (address, application)."""
    from art_gym.gateway import GatewaySettings, create_app

    made: list[Path] = []
    with ExitStack() as stack:

        def make(*, policy: Any = None, jobs: Any = None, **settings: Any) -> tuple[str, Any]:
            folder = tmp_path / f"gateway-{len(made)}"
            values = {"upstream": upstream, "model": "mock", "folder": folder, **settings}
            made.append(folder)
            app = create_app(GatewaySettings.of(**values), policy=policy, jobs=jobs)
            return stack.enter_context(serving(app)), app

        yield make


@pytest.fixture
def gateway(make_gateway: Callable[..., Any]) -> str:
    """The address of a gateway with default settings."""
    address: str = make_gateway()[0]
    return address


class Captured:
    """An episode of a gateway that runs in another thread, as its store has it."""

    def __init__(self, address: str, app: Any) -> None:
        self._app, self._store = app, app.state.gateway.store
        made = self._store.create(group="g", scenario=None, metadata={}, key_hash="", idempotency=None)
        self.id: str = self.run(made).id
        self.base_url = f"{address}/episodes/{self.id}/v1"

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run something in the gateway's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._app.state.loop).result(20)

    def calls(self) -> list[Any]:
        """The calls that were captured."""
        found: list[Any] = self.run(self._store.calls(self.id))
        return found

    def finish(self, reward: float = 1.0) -> Any:
        """Finish it, and give the episode."""
        self.run(self._store.finish(self.id, reward=reward, rewards={}, metrics={}, failure=None, idempotency=None))
        return self.run(self._store.episode(self.id))


@pytest.fixture
def capture(make_gateway: Callable[..., Any]) -> Callable[..., Captured]:
    """Starts a gateway with the settings given, and an episode in it."""

    def start(**settings: Any) -> Captured:
        return Captured(*make_gateway(**settings))

    return start
