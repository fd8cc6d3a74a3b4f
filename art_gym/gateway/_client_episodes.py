"""Episodes that a client has begun: what an agent needs to play them, and how they end."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from art_gym.errors import UsageError
from art_gym.gateway import _client_requests as requests
from art_gym.gateway._client_errors import GatewayError
from art_gym.gateway._client_http import AsyncSender, Request, Sender

_log = logging.getLogger(__name__)

_CANCELLED_SECONDS = 10.0


class _Handle:
    """An episode that was begun.

    Attributes:
        id: The gateway's name for it.
        base_url: For any OpenAI client; what is asked there is captured.
        api_key: Opens this episode only.
        model: The policy's name.
        group: As given.
        scenario: As given.
        is_finished: Whether it takes no more calls.
        reward: What it was finished with.
        failure: Why it failed, if it did.
    """

    def __init__(self, made: Mapping[str, Any], group: str | None, scenario: Any) -> None:
        try:
            self.id, self.base_url = str(made["id"]), str(made["base_url"])
        except (KeyError, TypeError):
            raise GatewayError(f"the answer has no id and base_url ({made!r:.200}): is that an art_gym gateway?") from None
        self.api_key = str(made.get("api_key") or "none")
        self.model = str(made.get("model") or "")
        self.group, self.scenario = group, scenario
        self.is_finished = False
        self.reward: float | None = None
        self.failure: str | None = None

    @property
    def environ(self) -> dict[str, str]:
        """The environment variables by which programs on the OpenAI SDK find the episode."""
        names = {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_BASE": self.base_url, "OPENAI_API_KEY": self.api_key}
        return names | {"OPENAI_MODEL": self.model, "ART_GYM_EPISODE": self.id}

    def _finishing(self, reward: Any, rewards: Any, metrics: Any, failure: str | None) -> Request:
        if self.is_finished:
            raise UsageError(f"episode {self.id} is finished; append_reward adds to what it earned")
        body = requests.reward_body(reward, rewards, metrics)
        return Request.changing(f"/episodes/{self.id}/finish", body | {"failure": failure})

    def _finished(self, record: Any, reward: Any, failure: str | None) -> dict[str, Any]:
        self.is_finished, self.failure = True, failure
        kept: dict[str, Any] = dict(record or {})
        told = kept.get("reward", reward)
        self.reward = None if told is None or failure is not None else float(told)
        return kept

    def _appending(self, reward: Any, rewards: Any, metrics: Any) -> Request:
        return Request.changing(f"/episodes/{self.id}/rewards", requests.reward_body(reward, rewards, metrics))

    def warn_open(self) -> None:
        if not self.is_finished:
            _log.warning("episode %s was left open: it can be trained on once it is finished, by finish(reward=…)", self.id)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, base_url={self.base_url!r})"


def _told(error: BaseException) -> str:
    """What a failed episode's record says of an exception."""
    return "".join(traceback.format_exception(error)).strip()[-4000:] if error.__traceback__ else f"{type(error).__name__}: {error}"


class ClientEpisode(_Handle):
    """An episode of a `Client`; left by an exception, it is finished as failed and the exception goes on."""

    def __init__(self, sender: Sender, made: Mapping[str, Any], group: str | None, scenario: Any) -> None:
        super().__init__(made, group, scenario)
        self._sender = sender

    def finish(
        self,
        reward: float | None = None,
        *,
        rewards: Mapping[str, float] | None = None,
        metrics: Mapping[str, float] | None = None,
        failure: str | None = None,
    ) -> dict[str, Any]:
        """End the episode; returns its record.

        Args:
            reward: What it earned.
            rewards: Its named components.
            metrics: Figures that aren't reward; "success" counts as such in reports.
            failure: Why it doesn't count: it then stays out of its group's baseline.

        Raises:
            GatewayError: The gateway refuses.
            UsageError: It is finished, or a figure is no finite number.
        """
        return self._finished(self._sender.send(self._finishing(reward, rewards, metrics, failure)), reward, failure)

    def fail(self, error: BaseException | str) -> dict[str, Any]:
        """End the episode as failed."""
        return self.finish(failure=error if isinstance(error, str) else _told(error))

    def append_reward(
        self, reward: float | None = None, *, rewards: Mapping[str, float] | None = None, metrics: Mapping[str, float] | None = None
    ) -> dict[str, Any]:
        """Add to what a finished episode earned, such as a judge's verdict; returns its record."""
        return dict(self._sender.send(self._appending(reward, rewards, metrics)))

    def fetch(self) -> dict[str, Any]:
        """Return the episode as the gateway has it, with its calls."""
        return dict(self._sender.send(Request("GET", f"/episodes/{self.id}")))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.warn_open()
        elif not self.is_finished:
            try:
                self.fail(error)
            except GatewayError as refused:
                _log.warning("episode %s could not be finished as failed: %s", self.id, refused)


class AsyncClientEpisode(_Handle):
    """An episode of an `AsyncClient`; see `ClientEpisode`."""

    def __init__(self, sender: AsyncSender, made: Mapping[str, Any], group: str | None, scenario: Any) -> None:
        super().__init__(made, group, scenario)
        self._sender = sender

    async def finish(
        self,
        reward: float | None = None,
        *,
        rewards: Mapping[str, float] | None = None,
        metrics: Mapping[str, float] | None = None,
        failure: str | None = None,
    ) -> dict[str, Any]:
        """End the episode; see `ClientEpisode.finish`."""
        return self._finished(await self._sender.send(self._finishing(reward, rewards, metrics, failure)), reward, failure)

    async def fail(self, error: BaseException | str) -> dict[str, Any]:
        """End the episode as failed."""
        return await self.finish(failure=error if isinstance(error, str) else _told(error))

    async def append_reward(
        self, reward: float | None = None, *, rewards: Mapping[str, float] | None = None, metrics: Mapping[str, float] | None = None
    ) -> dict[str, Any]:
        """Add to what a finished episode earned."""
        return dict(await self._sender.send(self._appending(reward, rewards, metrics)))

    async def fetch(self) -> dict[str, Any]:
        """Return the episode as the gateway has it, with its calls."""
        return dict(await self._sender.send(Request("GET", f"/episodes/{self.id}")))


class Opening:
    """`async with client.episode(…) as episode`, or `episode = await client.episode(…)`."""

    def __init__(self, sender: AsyncSender, request: Request, group: str | None, scenario: Any) -> None:
        self._sender, self._request, self._group, self._scenario = sender, request, group, scenario
        self._episode: AsyncClientEpisode | None = None

    async def _open(self) -> AsyncClientEpisode:
        self._episode = AsyncClientEpisode(self._sender, await self._sender.send(self._request), self._group, self._scenario)
        return self._episode

    def __await__(self) -> Any:
        return self._open().__await__()

    async def __aenter__(self) -> AsyncClientEpisode:
        return await self._open()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        episode = self._episode
        assert episode is not None
        if error is None:
            episode.warn_open()
        elif not episode.is_finished:
            failing = asyncio.ensure_future(episode.fail(error))
            try:
                # A rollout that is cancelled still tells of it, within a bounded time.
                await asyncio.wait_for(asyncio.shield(failing), None if isinstance(error, Exception) else _CANCELLED_SECONDS)
            except (GatewayError, TimeoutError) as refused:
                failing.cancel()
                _log.warning("episode %s could not be finished as failed: %s", episode.id, refused or "no answer in time")
