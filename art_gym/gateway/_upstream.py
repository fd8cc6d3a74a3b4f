"""The connection to vLLM: requests go out as they are given, and what goes wrong on the way becomes an error that clients understand."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp
from yarl import URL

from art_gym.gateway._errors import ApiError
from art_gym.gateway.settings import GatewaySettings

_KEEPALIVE_SECONDS = 3.0
"""Less than the 5 seconds after which vLLM's server closes an idle connection, so that a request doesn't meet a closed one."""

_BROKEN = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)


class Upstream:
    """One vLLM server. It is opened and closed within the event loop that uses it."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._urls: dict[str, URL] = {}
        self._session: aiohttp.ClientSession | None = None

    @property
    def base_url(self) -> str:
        """Such as "http://127.0.0.1:8001/v1"."""
        return self._settings.upstream

    def open(self) -> None:
        """Make connections possible."""
        settings = self._settings
        headers = {}
        if settings.upstream_key is not None:
            headers["Authorization"] = f"Bearer {settings.upstream_key.get_secret_value()}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS, ttl_dns_cache=60),
            timeout=aiohttp.ClientTimeout(
                total=settings.answer_seconds, sock_connect=settings.connect_seconds, sock_read=settings.silence_seconds
            ),
            headers=headers,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=2**18,
        )

    async def close(self) -> None:
        """End all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def send(
        self, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None, *, method: str = "POST", query: str = ""
    ) -> aiohttp.ClientResponse:
        """Send a request; the answer's head has arrived when this returns, and the caller closes or reads to the end what follows it.

        Args:
            path: After the base URL, such as "/chat/completions".
            body: JSON.
            headers: In addition to the key.
            method: Of HTTP.
            query: After the "?", as it was received.

        Raises:
            ApiError: 502 if the connection broke, 503 if there is none, 504 if it took too long.
        """
        if self._session is None:
            raise ApiError(503, "The gateway is shutting down.", headers={"Retry-After": "5"})
        url = URL(f"{self.base_url}{path}?{query}", encoded=True) if query else self._url(path)
        for attempt in (1, 2):
            try:
                return await self._session.request(method, url, data=body, headers=headers, allow_redirects=False)
            except _BROKEN as error:
                # A kept connection that the server closed at this moment; nothing was answered, so another one may be asked.
                if attempt == 2 or isinstance(error, aiohttp.ClientConnectorError):
                    raise failure(error) from error
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                raise failure(error) from error
        raise AssertionError("unreachable")

    async def read(self, response: aiohttp.ClientResponse) -> bytes:
        """Read the whole answer.

        Raises:
            ApiError: It broke off, or took too long.
        """
        try:
            return await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise failure(error) from error

    def _url(self, path: str) -> URL:
        if (url := self._urls.get(path)) is None:
            url = URL(self.base_url + path, encoded=True)
            if len(self._urls) < 100:
                self._urls[path] = url
        return url


def failure(error: Exception) -> ApiError:
    """What a client is told when the model server fails."""
    if isinstance(error, TimeoutError):
        return ApiError(504, "The model server gave no answer in time.")
    if isinstance(error, aiohttp.ClientConnectorError):
        return ApiError(503, "The model server can't be reached: it is starting, or has died.", headers={"Retry-After": "2"})
    return ApiError(502, f"The connection to the model server broke ({type(error).__name__}).")
