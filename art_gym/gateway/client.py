"""The client: begin episodes, reward them, and train from them, in any program; it needs httpx and no torch.

    with client.episode(group="q17") as episode:
        answer = my_agent(base_url=episode.base_url, api_key=episode.api_key, model=episode.model)
        episode.finish(reward=float(answer == "42"))

`Client` waits in the caller's thread, `AsyncClient` in the event loop; otherwise they are the same.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import httpx

from art_gym.gateway import _client_requests as requests
from art_gym.gateway._client_episodes import AsyncClientEpisode, ClientEpisode, Opening
from art_gym.gateway._client_errors import GatewayError, TrainingFailed
from art_gym.gateway._client_gather import Function, Played, PlayedGroup, Settings, gather
from art_gym.gateway._client_http import Address, AsyncSender, Attempts, Request, Sender
from art_gym.gateway._client_requests import Trained
from art_gym.rollout._blocking import run_blocking

__all__ = [
    "AsyncClient",
    "AsyncClientEpisode",
    "Client",
    "ClientEpisode",
    "GatewayError",
    "Played",
    "PlayedGroup",
    "Rollout",
    "Trained",
    "TrainingFailed",
]

OnEvent = Callable[[dict[str, Any]], Any]

_EVENTS = {"Accept": "application/x-ndjson, text/event-stream;q=0.5"}
# A heartbeat comes more often than that; what says nothing for so long is gone.
_SILENCE = httpx.Timeout(60.0, connect=10.0)


class Rollout:
    """A function that plays an episode of a scenario; made by `Client.rollout`.

    Called with scenarios, it plays them: see `Client.gather`, whose arguments it takes as defaults and overrides.
    """

    def __init__(self, client: Client | AsyncClient, function: Function, defaults: Mapping[str, Any]) -> None:
        self.client, self.function, self.defaults = client, function, dict(defaults)
        self.__name__ = getattr(function, "__name__", "rollout")
        self.__doc__ = function.__doc__

    def __call__(self, scenario: Any, episode: Any) -> Any:
        """Call the function as it is."""
        return self.function(scenario, episode)

    def gather(self, scenarios: Iterable[Any], **options: Any) -> Any:
        """Play the scenarios; to be awaited with an `AsyncClient`."""
        return self.client.gather(self, scenarios, **{**self.defaults, **options})


class Client:
    """A gateway's client for code that isn't asynchronous; it may be used by several threads at once.

    Args:
        url: The gateway's address; by default the variable ART_GYM_URL, else http://127.0.0.1:8000.
        api_key: What opens it; by default the variable ART_GYM_API_KEY.
        patience: Seconds for which a gateway that can't be reached, or can't answer now, is asked again.

    Raises:
        UsageError: The address or the key can't be one.
    """

    def __init__(self, url: str | None = None, *, api_key: str | None = None, patience: float = 30.0) -> None:
        self.address = Address.of(url, api_key)
        self.patience = patience
        self._sender = Sender(self.address, patience=patience)

    # ------------------------------------------------------------- episodes

    def episode(self, group: str | None = None, scenario: Any = None, metadata: Mapping[str, Any] | None = None) -> ClientEpisode:
        """Begin an episode.

        Args:
            group: Names the episodes that are attempts at the same thing.
            scenario: What it is an attempt at; JSON data or a `Scenario`.
            metadata: What else is to be kept with it; JSON data.
        """
        made = self._sender.send(requests.create(group, scenario, metadata))
        return ClientEpisode(self._sender, made, group, scenario)

    def fetch(self, episode: str) -> dict[str, Any]:
        """Return an episode as the gateway has it, with its calls."""
        return dict(self._sender.send(Request("GET", f"/episodes/{episode}")))

    def episodes(self, **filters: Any) -> dict[str, Any]:
        """List episodes, a page at a time: `group`, `state`, `after`, `limit`."""
        return dict(self._sender.send(Request("GET", "/episodes", params=filters)))

    def delete(self, episode: str) -> None:
        """Delete an episode."""
        self._sender.send(Request("DELETE", f"/episodes/{episode}"))

    def rollout(self, function: Function | None = None, **defaults: Any) -> Any:
        """Decorate a function of a scenario and an episode: `@client.rollout`, or `@client.rollout(group_size=8)` with `gather`'s arguments."""
        return Rollout(self, function, defaults) if function is not None else lambda decorated: Rollout(self, decorated, defaults)

    def gather(
        self,
        rollout: Function,
        scenarios: Iterable[Any],
        *,
        group_size: int = 8,
        concurrency: int = 16,
        timeout: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        on_episode: Callable[[Played], None] | None = None,
    ) -> list[PlayedGroup]:
        """Play `group_size` episodes of each scenario, and return them as groups in the order of the scenarios, ready for `train`.

        Args:
            rollout: A function of a scenario and an episode (`ClientEpisode`; a coroutine function gets an `AsyncClientEpisode`). It returns
                the reward, a mapping with `reward`, `rewards` and `metrics`, or None once it has finished the episode itself. What it
                raises makes a failed episode.
            scenarios: Anything that is JSON data.
            group_size: Episodes of each.
            concurrency: The most at once.
            timeout: Seconds that an episode may take; past it it failed, and a plain function is left behind in its thread.
            metadata: Kept with each episode.
            on_episode: Told of each as it ends.

        Raises:
            GatewayError: The gateway refuses, or can't be reached; what was in play is failed.
            UsageError: It can't be played as asked.
        """
        settings = Settings(group_size, concurrency, timeout, metadata, on_episode)

        async def played() -> list[PlayedGroup]:
            async with AsyncClient(self.address.url, api_key=self.address.api_key, patience=self.patience) as client:
                return await gather(self, client, rollout, scenarios, settings)

        return run_blocking(played())

    # ------------------------------------------------------------- training

    def train(self, groups: Iterable[Any], *, on_event: OnEvent | None = None, timeout: float | None = None, **config: Any) -> Trained:
        """Train on groups of episodes, and wait until it is done: from then on calls are answered by the new version.

        Args:
            groups: Groups of ids, of what `episode` gave, or of art_gym's `Episode`s; or what `gather` returned.
            on_event: Told of each event, a dictionary with its `type`.
            timeout: Seconds after which the job is cancelled.
            config: How to train, such as `learning_rate=1e-4`; see the train API's `TrainConfig`.

        Raises:
            TrainingFailed: The job failed or was cancelled, with a reason and advice.
            GatewayError: The gateway refuses the job, or can't be reached any more.
            UsageError: A group holds something that is no episode.
        """
        job = self.submit(groups, **config)
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            for event in self.events(job["id"]):
                if on_event is not None:
                    on_event(event)
                if event["type"] in requests.TERMINAL:
                    return requests.outcome(event)
                if deadline is not None and time.monotonic() > deadline:
                    self._give_up(job["id"])
                    deadline = None
        except KeyboardInterrupt:
            self._give_up(job["id"])
            raise
        return requests.outcome_of_job(self.job(job["id"]))

    def _give_up(self, job: str) -> None:
        # One that publishes its version can't be cancelled, and ends soon.
        with suppress(GatewayError):
            self.cancel(job)

    def submit(self, groups: Iterable[Any], **config: Any) -> dict[str, Any]:
        """Begin a training job, and return its record without waiting for it."""
        return dict(self._sender.send(requests.train(groups, config, dry_run=False)))

    def check(self, groups: Iterable[Any], **config: Any) -> dict[str, Any]:
        """Have a job checked that is not to be begun; returns what it would train on."""
        return dict(self._sender.send(requests.train(groups, config, dry_run=True)))

    def events(self, job: str, after: int = 0) -> Iterator[dict[str, Any]]:
        """Follow a job: yield its events from the one after number `after` to the last, over broken connections, each once.

        Raises:
            GatewayError: There is no such job, or the gateway can't be reached any more.
        """
        lines, attempts = requests.EventLines(after), Attempts(self.address, self.patience)
        while True:
            problem: httpx.TransportError | httpx.Response
            try:
                with self._sender.http.stream("GET", f"/train/{job}/events", headers=_following(lines), timeout=_SILENCE) as response:
                    if response.status_code == 204:
                        return
                    if not response.is_success:
                        response.read()
                        problem = response
                    else:
                        problem = httpx.RemoteProtocolError("the events ended before the job did")
                        for line in response.iter_lines():
                            if (event := lines.feed(line)) is not None:
                                attempts.reset()
                                yield event
                                if event["type"] in requests.TERMINAL:
                                    return
            except httpx.TransportError as error:
                problem = error
            lines.cut()
            time.sleep(attempts.after(problem))

    def job(self, job: str) -> dict[str, Any]:
        """Return a job's record."""
        return dict(self._sender.send(Request("GET", f"/train/{job}")))

    def cancel(self, job: str) -> dict[str, Any]:
        """Cancel a job that is queued or trains."""
        return dict(self._sender.send(Request("POST", f"/train/{job}/cancel")))

    def checkpoints(self) -> dict[str, Any]:
        """Return the versions that are kept, and which one answers."""
        return dict(self._sender.send(Request("GET", "/checkpoints")))

    def activate(self, step: int) -> dict[str, Any]:
        """Let calls be answered by a version that is kept."""
        return dict(self._sender.send(Request("POST", f"/checkpoints/{int(step)}/activate")))

    def download_adapter(self, step: int, to: str | os.PathLike[str]) -> Path:
        """Write a version's adapter into a zip file."""
        return _write(to, self._sender.fetch(Request("GET", f"/checkpoints/{int(step)}/adapter")).content)

    def close(self) -> None:
        """Close its connections."""
        self._sender.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.address.url!r})"


class AsyncClient:
    """A gateway's client for asynchronous code, to be used in one event loop; see `Client`."""

    def __init__(self, url: str | None = None, *, api_key: str | None = None, patience: float = 30.0) -> None:
        self.address = Address.of(url, api_key)
        self.patience = patience
        self._sender = AsyncSender(self.address, patience=patience)

    def episode(self, group: str | None = None, scenario: Any = None, metadata: Mapping[str, Any] | None = None) -> Opening:
        """Begin an episode: `async with client.episode(…) as episode`, or await it."""
        return Opening(self._sender, requests.create(group, scenario, metadata), group, scenario)

    async def fetch(self, episode: str) -> dict[str, Any]:
        """Return an episode as the gateway has it, with its calls."""
        return dict(await self._sender.send(Request("GET", f"/episodes/{episode}")))

    async def episodes(self, **filters: Any) -> dict[str, Any]:
        """List episodes, a page at a time: `group`, `state`, `after`, `limit`."""
        return dict(await self._sender.send(Request("GET", "/episodes", params=filters)))

    async def delete(self, episode: str) -> None:
        """Delete an episode."""
        await self._sender.send(Request("DELETE", f"/episodes/{episode}"))

    def rollout(self, function: Function | None = None, **defaults: Any) -> Any:
        """Decorate a function of a scenario and an episode; see `Client.rollout`."""
        return Rollout(self, function, defaults) if function is not None else lambda decorated: Rollout(self, decorated, defaults)

    async def gather(
        self,
        rollout: Function,
        scenarios: Iterable[Any],
        *,
        group_size: int = 8,
        concurrency: int = 16,
        timeout: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        on_episode: Callable[[Played], None] | None = None,
    ) -> list[PlayedGroup]:
        """Play `group_size` episodes of each scenario; see `Client.gather`."""
        settings = Settings(group_size, concurrency, timeout, metadata, on_episode)
        with Client(self.address.url, api_key=self.address.api_key, patience=self.patience) as sync:
            return await gather(sync, self, rollout, scenarios, settings)

    async def train(self, groups: Iterable[Any], *, on_event: OnEvent | None = None, timeout: float | None = None, **config: Any) -> Trained:
        """Train on groups of episodes, and wait until it is done; see `Client.train`. Cancelled, it cancels the job."""
        job = await self.submit(groups, **config)
        try:
            async with asyncio.timeout(timeout):
                return await self._follow(job["id"], on_event)
        except (TimeoutError, asyncio.CancelledError) as error:
            # One that publishes its version can't be cancelled, and ends soon.
            with suppress(GatewayError):
                await asyncio.shield(self.cancel(job["id"]))
            if isinstance(error, asyncio.CancelledError):
                raise
            return await self._follow(job["id"], None)

    async def _follow(self, job: str, on_event: OnEvent | None) -> Trained:
        async for event in self.events(job):
            if on_event is not None:
                told = on_event(event)
                if asyncio.iscoroutine(told):
                    await told
            if event["type"] in requests.TERMINAL:
                return requests.outcome(event)
        return requests.outcome_of_job(await self.job(job))

    async def submit(self, groups: Iterable[Any], **config: Any) -> dict[str, Any]:
        """Begin a training job, and return its record without waiting for it."""
        return dict(await self._sender.send(requests.train(groups, config, dry_run=False)))

    async def check(self, groups: Iterable[Any], **config: Any) -> dict[str, Any]:
        """Have a job checked that is not to be begun; returns what it would train on."""
        return dict(await self._sender.send(requests.train(groups, config, dry_run=True)))

    async def events(self, job: str, after: int = 0) -> AsyncIterator[dict[str, Any]]:
        """Follow a job; see `Client.events`."""
        lines, attempts = requests.EventLines(after), Attempts(self.address, self.patience)
        while True:
            problem: httpx.TransportError | httpx.Response
            try:
                following = self._sender.http.stream("GET", f"/train/{job}/events", headers=_following(lines), timeout=_SILENCE)
                async with following as response:
                    if response.status_code == 204:
                        return
                    if not response.is_success:
                        await response.aread()
                        problem = response
                    else:
                        problem = httpx.RemoteProtocolError("the events ended before the job did")
                        async for line in response.aiter_lines():
                            if (event := lines.feed(line)) is not None:
                                attempts.reset()
                                yield event
                                if event["type"] in requests.TERMINAL:
                                    return
            except httpx.TransportError as error:
                problem = error
            lines.cut()
            await asyncio.sleep(attempts.after(problem))

    async def job(self, job: str) -> dict[str, Any]:
        """Return a job's record."""
        return dict(await self._sender.send(Request("GET", f"/train/{job}")))

    async def cancel(self, job: str) -> dict[str, Any]:
        """Cancel a job that is queued or trains."""
        return dict(await self._sender.send(Request("POST", f"/train/{job}/cancel")))

    async def checkpoints(self) -> dict[str, Any]:
        """Return the versions that are kept, and which one answers."""
        return dict(await self._sender.send(Request("GET", "/checkpoints")))

    async def activate(self, step: int) -> dict[str, Any]:
        """Let calls be answered by a version that is kept."""
        return dict(await self._sender.send(Request("POST", f"/checkpoints/{int(step)}/activate")))

    async def download_adapter(self, step: int, to: str | os.PathLike[str]) -> Path:
        """Write a version's adapter into a zip file."""
        answer = await self._sender.fetch(Request("GET", f"/checkpoints/{int(step)}/adapter"))
        return await asyncio.to_thread(_write, to, answer.content)

    async def close(self) -> None:
        """Close its connections."""
        await self._sender.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncClient({self.address.url!r})"


def _following(lines: requests.EventLines) -> dict[str, str]:
    return _EVENTS | ({"Last-Event-ID": str(lines.last)} if lines.last else {})


def _write(to: str | os.PathLike[str], content: bytes) -> Path:
    path = Path(to)
    path.write_bytes(content)
    return path
