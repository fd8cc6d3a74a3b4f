"""The HTTP side of a chat policy: what answers and failures mean, and retries under one deadline, over one server or several.

Written on a transport of its own rather than on the openai SDK, which spends thirty times as much processor time on a request; with hundreds of
episodes in flight that would bound the rollout. Connections belong to `_http`, and which server takes a request to `_replicas`.
"""

from __future__ import annotations

import asyncio
import errno
import math
import random
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from weakref import WeakKeyDictionary

from art_gym._version import __version__
from art_gym.errors import ContextOverflow, EngineError, PolicyError, UsageError
from art_gym.rollout import ServerLoad
from art_gym_agents._completion import Completion, decode, error_of
from art_gym_agents._connections import ConnectFailed, open_files_limit, raise_open_files_limit
from art_gym_agents._http import Session
from art_gym_agents._metrics import add_up, parse_load
from art_gym_agents._replicas import Replica, Replicas
from art_gym_agents._responses import BadResponse, BrokenConnection
from art_gym_agents._urls import locate

RETRIES = 8
"""How often a request is sent again after 408, 429, 5xx or a broken connection; to several servers, how often to all that can take it."""

_FIRST_DELAY, _LONGEST_DELAY = 0.25, 8.0
_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
# What says that this server can't now, so that another might.
_ELSEWHERE = frozenset({429, 503, 529})
_OVERFLOW = re.compile(r"context[ _](?:length|size|window)|maximum model length", re.IGNORECASE)

_UNREACHABLE = (BadResponse, BrokenConnection, OSError)

_PROBE_SECONDS = 5.0
_LOAD_SECONDS = 0.9
_METRICS_AGAIN = 60.0
"""Seconds until a server that showed no metrics is asked for them again."""


@dataclass(slots=True, eq=False)
class _Pool:
    """What belongs to one event loop: the connections, what is known of the servers, and the probes under way."""

    session: Session
    replicas: Replicas
    probes: set[asyncio.Task[None]] = field(default_factory=set)


@dataclass(slots=True)
class _Trouble:
    """Why a request has to be sent again.

    Attributes:
        text: For the error, if that doesn't help.
        elsewhere: Whether another server might take it at once.
        retry_after: Seconds that the server asked to be left alone.
        refusal: What connecting raised, if nothing listens there.
    """

    text: str
    elsewhere: bool
    retry_after: float = 0.0
    refusal: Exception | None = None


class ChatClient:
    """Sends chat-completion requests to servers of the same model.

    Sessions belong to the event loop that they were opened in, so that each loop gets its own.

    Args:
        base_urls: Such as "http://127.0.0.1:8000/v1"; one or several.
        api_key: Sent as a bearer token.
        patience: Seconds that servers which all refuse connections are waited for, before they count as gone.
    """

    def __init__(self, base_urls: str | Sequence[str], *, api_key: str | None = None, patience: float = 15.0) -> None:
        urls = [base_urls] if isinstance(base_urls, str) else [*base_urls]
        if not urls:
            raise UsageError("base_url names no server; give at least one URL, as http://127.0.0.1:8000/v1")
        for url in urls:
            if not (isinstance(url, str) and url.startswith(("http://", "https://"))):
                raise UsageError(f"base_url is {url!r}; it must start with http:// or https://, as in http://127.0.0.1:8000/v1")
            try:
                locate(url)
            except ValueError as error:
                shown = "" if "@" in url else f" {url!r}"
                raise UsageError(f"the base_url{shown} {error}; it looks like http://127.0.0.1:8000/v1") from error
        self.base_urls = tuple(dict.fromkeys(_under(url, "") for url in urls))
        self.patience = patience
        self._headers = {
            "User-Agent": f"art_gym/{__version__}",
            "Accept": "application/json, text/plain",
            "Content-Type": "application/json",
        }
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        try:
            Session(self._headers)
        except ValueError as error:
            raise UsageError("the api_key has a line end or another control character in it") from error
        self._pools: WeakKeyDictionary[asyncio.AbstractEventLoop, _Pool] = WeakKeyDictionary()
        # The global generator belongs to the user.
        self._jitter = random.Random()

    async def complete(self, body: bytes, *, timeout: float, key: str = "", home: str | None = None) -> tuple[Completion, str]:
        """POST `/chat/completions`; return the decoded answer, and the base URL of the server that gave it.

        Args:
            body: The request, as JSON.
            timeout: Seconds that it may take, retries included.
            key: The same for requests that share a prefix.
            home: The base URL that the last request of the same conversation went to.

        Raises:
            ContextOverflow: The conversation no longer fits.
            PolicyError: The server refused the request, or failed until the retries or the time ran out.
            EngineError: Nothing listens there, or not for `patience` seconds.
            UsageError: The server doesn't know the model or the key; or there are more connections than this process may have.
        """
        pool = self._pool()
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout
        gone_since: float | None = None
        pauses = failures = 0
        tried: set[Replica] = set()
        refused: set[Replica] = set()
        replica = self._choose(pool, key, home)
        while True:
            try:
                outcome = await self._attempt(pool, replica, body, deadline)
            except TimeoutError as error:
                replica.failed(time.monotonic())
                if gone_since is not None:
                    raise EngineError(self._nothing_answers()) from error
                raise PolicyError(f"{_endpoint(replica)} gave no answer within {timeout:g} s") from error
            if isinstance(outcome, Completion):
                return outcome, replica.url
            tried.add(replica)
            if outcome.refusal is not None:
                refused.add(replica)
            else:
                refused.clear()
            if outcome.elsewhere and (other := pool.replicas.other(key, tried, home)) is not None:
                replica = other
                continue
            delay = self._delay(pauses)
            if outcome.refusal is not None and all(one in refused or not one.alive for one in pool.replicas.all):
                # Waited for rather than counted: a server that reloads its weights may refuse for some seconds.
                gone_since = clock() if gone_since is None else gone_since
                if clock() + delay >= min(deadline, gone_since + self.patience):
                    raise EngineError(f"{self._nothing_answers()}: {outcome.refusal}") from outcome.refusal
            else:
                gone_since = None
                failures += 1
                if failures > RETRIES:
                    raise PolicyError(f"{outcome.text} ({RETRIES} retries)")
                delay = max(delay, min(outcome.retry_after, pool.replicas.next_ready()))
                if clock() + delay >= deadline:
                    raise PolicyError(f"{outcome.text} (after {failures} attempts there was no time for another within {timeout:g} s)")
            await asyncio.sleep(delay)
            pauses += 1
            tried.clear()
            pool = self._pool()  # the agent may have been closed meanwhile
            replica = self._choose(pool, key, home)

    async def server_load(self) -> ServerLoad | None:
        """Return what the servers that live show at `/metrics`, all together; None if none shows anything. It raises nothing."""
        pool = self._pool()
        now = time.monotonic()
        asked = [replica for replica in pool.replicas.all if replica.alive and replica.metrics_at <= now]
        return add_up(await asyncio.gather(*(self._load_of(pool, replica) for replica in asked)))

    async def close(self) -> None:
        """Close this loop's connections; a later request opens new ones."""
        pool = self._pools.pop(asyncio.get_running_loop(), None)
        if pool is None:
            return
        for probe in pool.probes:
            probe.cancel()
        await asyncio.gather(*pool.probes, return_exceptions=True)
        await pool.session.close()

    def _pool(self) -> _Pool:
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None:
            raise_open_files_limit()
            # A loop that ended without `close` can't close its connections any more; the collector does.
            for reference in self._pools.keyrefs():
                other = reference()
                if other is not None and other.is_closed():
                    self._pools.pop(other, None)
            pool = self._pools[loop] = _Pool(Session(self._headers), Replicas(self.base_urls))
        return pool

    def _choose(self, pool: _Pool, key: str, home: str | None) -> Replica:
        if len(pool.replicas.all) > 1:
            for replica in pool.replicas.to_probe():
                probe = asyncio.create_task(self._probe(pool, replica))
                pool.probes.add(probe)
                probe.add_done_callback(pool.probes.discard)
        return pool.replicas.choose(key, home)

    async def _attempt(self, pool: _Pool, replica: Replica, body: bytes, deadline: float) -> Completion | _Trouble:
        """Send the request to one server.

        Raises:
            TimeoutError: The deadline is over.
        """
        endpoint = _endpoint(replica)
        replica.in_flight += 1
        try:
            status, headers, answer = await pool.session.request("POST", endpoint, body, deadline=deadline)
        except ConnectFailed as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise UsageError(_too_many_files(pool)) from error
            replica.failed(time.monotonic())
            return _Trouble(f"{endpoint}: {error}", elsewhere=True, refusal=error)
        except BrokenConnection as error:
            replica.failed(time.monotonic())
            return _Trouble(f"{endpoint}: the connection broke ({error})", elsewhere=True)
        except BadResponse as error:
            raise PolicyError(f"{endpoint}: {error}") from error
        finally:
            replica.in_flight -= 1
        if status == 200:
            replica.answered()
            return decode(endpoint, answer)
        if status == 404 and pool.replicas.other("", {replica}) is not None:
            # Restarted, it may not have the policy's adapter yet. That nobody has it is for the last one to say.
            replica.take_out(time.monotonic())
            return _Trouble(f"{endpoint} answered 404: {error_of(answer)[0]}", elsewhere=True)
        if status >= 500:
            replica.failed(time.monotonic())
        else:
            replica.answered()
        if 300 <= status < 400:
            target = headers.get(b"location", b"")[:500].decode(errors="replace") or "no other place"
            raise UsageError(f"{endpoint} answered {status}, pointing to {target}; redirects aren't followed: correct the base_url")
        text = _raise_unless_retryable(endpoint, status, answer)
        retry_after = _retry_after(headers.get(b"retry-after", b"").decode(errors="replace"))
        if retry_after:
            replica.rest(time.monotonic() + retry_after)
        return _Trouble(f"{endpoint} answered {status}: {text}", elsewhere=status in _ELSEWHERE, retry_after=retry_after)

    async def _probe(self, pool: _Pool, replica: Replica) -> None:
        """Find out whether a server is back."""
        # Not every server has /health, whose place vLLM took over from others; every one lists its models.
        status = await self._status(pool, _beside(replica.url, "/health"))
        if status in (401, 403, 404, 405):
            status = await self._status(pool, _under(replica.url, "/models"))
        replica.probed(status is not None and status < 500, time.monotonic())

    async def _status(self, pool: _Pool, url: str) -> int | None:
        deadline = asyncio.get_running_loop().time() + _PROBE_SECONDS
        with suppress(*_UNREACHABLE):
            return (await pool.session.request("GET", url, deadline=deadline)).status
        return None

    async def _load_of(self, pool: _Pool, replica: Replica) -> ServerLoad | None:
        deadline = asyncio.get_running_loop().time() + _LOAD_SECONDS
        with suppress(*_UNREACHABLE):
            status, _, page = await pool.session.request("GET", _beside(replica.url, "/metrics"), deadline=deadline)
            load = parse_load(page) if status == 200 else None
            if load is None:
                replica.metrics_at = time.monotonic() + _METRICS_AGAIN
            return load
        return None

    def _delay(self, pauses: int) -> float:
        return float(min(_FIRST_DELAY * 2 ** min(pauses, 10), _LONGEST_DELAY) * self._jitter.uniform(0.5, 1.0))

    def _nothing_answers(self) -> str:
        return f"nothing answers at {', '.join(self.base_urls)}"


def _endpoint(replica: Replica) -> str:
    return _under(replica.url, "/chat/completions")


def _under(base_url: str, path: str) -> str:
    base, mark, query = base_url.partition("?")
    return f"{base.rstrip('/')}{path}{mark}{query}"


def _beside(base_url: str, path: str) -> str:
    """Where a server has what doesn't lie under /v1."""
    base, mark, query = base_url.partition("?")
    return f"{base.removesuffix('/v1')}{path}{mark}{query}"


def _too_many_files(pool: _Pool) -> str:
    in_flight = sum(replica.in_flight for replica in pool.replicas.all)
    return (
        f"no further connection can be opened: {in_flight} requests are in flight, and this process may have {open_files_limit()} files open; "
        "raise the limit with `ulimit -n`, or lower the concurrency"
    )


def _raise_unless_retryable(url: str, status: int, answer: bytes) -> str:
    """Return the error's text, if sending the request again may help; otherwise raise what it means."""
    text, code, parameter = error_of(answer)
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


def _retry_after(header: str) -> float:
    """Seconds that a Retry-After header asks for: a number or an HTTP date."""
    if not header:
        return 0.0
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(header) - datetime.now(UTC)).total_seconds()
        except (TypeError, ValueError):
            return 0.0
    return max(seconds, 0.0) if math.isfinite(seconds) else 0.0
