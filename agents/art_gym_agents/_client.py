"""The HTTP side of a chat policy: pooled connections, and retries under one deadline.

Written on aiohttp rather than on the openai SDK, which spends ten times as much processor time on a request; with hundreds of episodes in
flight that would bound the rollout.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp

from art_gym.errors import ContextOverflow, EngineError, PolicyError, UsageError

RETRIES = 8
"""How often a request is sent again after 408, 429, 5xx or a broken connection."""

_FIRST_DELAY, _LONGEST_DELAY = 0.25, 8.0
_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_OVERFLOW = re.compile(r"context[ _](?:length|size|window)|maximum model length", re.IGNORECASE)

# uvicorn, under vLLM too, closes a connection that was idle for 5 s; one reused at that moment would be reset.
_KEEP_ALIVE = 4.0
_CONNECT_TIMEOUT = 5.0


class ChatClient:
    """Sends chat-completion requests to one base URL.

    Sessions belong to the event loop that they were opened in, so that each loop gets its own.

    Args:
        base_url: Such as "http://127.0.0.1:8000/v1".
        api_key: Sent as a bearer token.
        patience: Seconds that a server which refuses connections is waited for, before it counts as gone.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None, patience: float = 15.0) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise UsageError(f"base_url is {base_url!r}; it must start with http:// or https://, as in http://127.0.0.1:8000/v1")
        self.base_url = base_url.rstrip("/")
        self.patience = patience
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = WeakKeyDictionary()
        # The global generator belongs to the user.
        self._jitter = random.Random()

    async def complete(self, body: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        """POST `/chat/completions` and return the decoded answer.

        Raises:
            ContextOverflow: The conversation no longer fits.
            PolicyError: The server refused the request, or failed until the retries or the time ran out.
            EngineError: Nothing listens there, or not for `patience` seconds.
            UsageError: The server doesn't know the model or the key.
        """
        payload = json.dumps(body, separators=(",", ":")).encode()
        url = f"{self.base_url}/chat/completions"
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout
        gone_since: float | None = None
        attempt = 0
        while True:
            delay = self._delay(attempt)
            try:
                status, headers, answer = await self._post(url, payload, deadline - clock())
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                # Waited for rather than counted: a server that reloads its weights may refuse for some seconds.
                gone_since = clock() if gone_since is None else gone_since
                if clock() + delay >= min(deadline, gone_since + self.patience):
                    raise EngineError(f"nothing answers at {self.base_url}: {error}") from error
                await asyncio.sleep(delay)
                attempt += 1
                continue
            except TimeoutError as error:
                if gone_since is not None:
                    raise EngineError(f"nothing answers at {self.base_url}") from error
                raise PolicyError(f"{url} gave no answer within {timeout:g} s") from error
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                problem = f"{url}: the connection broke ({error!r})"
            else:
                if status == 200:
                    return _decode(url, answer)
                problem = f"{url} answered {status}: {_raise_unless_retryable(url, status, answer)}"
                delay = max(delay, _retry_after(headers.get("Retry-After")))
            gone_since = None
            attempt += 1
            if attempt > RETRIES:
                raise PolicyError(f"{problem} ({RETRIES} retries)")
            if clock() + delay >= deadline:
                raise PolicyError(f"{problem} (after {attempt} attempts there was no time for another within {timeout:g} s)")
            await asyncio.sleep(delay)

    async def close(self) -> None:
        """Close this loop's connections; a later request opens new ones."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    async def _post(self, url: str, payload: bytes, seconds: float) -> tuple[int, Any, bytes]:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.closed:
            # No limit on connections: how many requests are in flight is the runner's choice.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE)
            session = aiohttp.ClientSession(connector=connector, headers=self._headers, cookie_jar=aiohttp.DummyCookieJar())
            self._sessions[loop] = session
        timeout = aiohttp.ClientTimeout(total=max(seconds, 0.001), sock_connect=_CONNECT_TIMEOUT)
        async with session.post(url, data=payload, timeout=timeout) as response:
            return response.status, response.headers, await response.read()

    def _delay(self, attempt: int) -> float:
        return float(min(_FIRST_DELAY * 2**attempt, _LONGEST_DELAY) * self._jitter.uniform(0.5, 1.0))


def _decode(url: str, answer: bytes) -> dict[str, Any]:
    try:
        data = json.loads(answer)
    except ValueError as error:
        raise PolicyError(f"{url} answered with something that isn't JSON: {answer[:200]!r}") from error
    if not isinstance(data, dict):
        raise PolicyError(f"{url} answered with JSON that isn't an object: {answer[:200]!r}")
    return data


def _raise_unless_retryable(url: str, status: int, answer: bytes) -> str:
    """Return the error's text, if sending the request again may help; otherwise raise what it means."""
    text, code, parameter = _error_of(answer)
    if status in _RETRIED:
        return text
    message = f"{url} answered {status}: {text}"
    if status in (401, 403, 404):
        raise UsageError(f"{message}; check the URL, the model's name and the API key")
    if status == 400 and parameter in ("max_tokens", "max_completion_tokens"):
        raise UsageError(f"{message}; lower max_tokens")
    if status in (400, 413, 422) and (code == "context_length_exceeded" or _OVERFLOW.search(text)):
        raise ContextOverflow(text)
    raise PolicyError(message)


def _error_of(answer: bytes) -> tuple[str, Any, Any]:
    """Text, code and parameter of an OpenAI-style error, or the body's beginning where it has another form."""
    try:
        data = json.loads(answer)
    except ValueError:
        data = None
    error = data.get("error", data) if isinstance(data, dict) else None
    if isinstance(error, dict) and "message" in error:
        return str(error["message"])[:1000], error.get("code"), error.get("param")
    return answer[:1000].decode(errors="replace"), None, None


def _retry_after(header: str | None) -> float:
    """Seconds that a Retry-After header asks for: a number or an HTTP date."""
    if not header:
        return 0.0
    try:
        return max(float(header), 0.0)
    except ValueError:
        pass
    try:
        return max((parsedate_to_datetime(header) - datetime.now(UTC)).total_seconds(), 0.0)
    except (TypeError, ValueError):
        return 0.0
