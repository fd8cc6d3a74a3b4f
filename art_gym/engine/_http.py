"""JSON requests to the server, with a deadline, waited for while the server is briefly unreachable."""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

from art_gym.errors import EngineError, UsageError

_RETRY_SECONDS = 0.5


class StatusError(Exception):
    """The server answered with an HTTP error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status
        self.text = text


def request(
    url: str,
    body: Mapping[str, Any] | None = None,
    *,
    method: str | None = None,
    timeout: float,
    api_key: str | None = None,
) -> Any:
    """Send one request and return the answer's JSON, or None if it has none.

    Raises:
        StatusError: The answer's status isn't 2xx.
        OSError: No connection, or no answer within `timeout` seconds (TimeoutError).
        UsageError: The address or the key can't be one.
    """
    parts, host, port = _split(url)
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise UsageError("the API key holds characters that can't be sent, such as a line's end; correct it")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(host, port, timeout=timeout)
    headers = {"Accept": "application/json"}
    if body is not None:
        headers["Content-Type"] = "application/json"
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
    try:
        connection.request(method or ("GET" if body is None else "POST"), target, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read().decode("utf-8", "replace")
    except http.client.HTTPException as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()
    if not 200 <= response.status < 300:
        raise StatusError(response.status, _message(text))
    try:
        return json.loads(text) if text.strip() else None
    except json.JSONDecodeError:
        return None


def persistent_request(
    url: str,
    body: Mapping[str, Any] | None = None,
    *,
    method: str | None = None,
    timeout: float,
    api_key: str | None = None,
    check: Callable[[], None] = lambda: None,
) -> Any:
    """Like `request`, but tries again while the server is unreachable or says that it's busy (502, 503, 504), until `timeout` seconds are over.

    For requests that may be sent twice. `check` is called before each attempt and raises when there is no point in waiting any longer.

    Raises:
        StatusError: The answer's status is another error.
        EngineError: The deadline passed.
    """
    deadline = time.monotonic() + timeout
    while True:
        check()
        remaining = deadline - time.monotonic()
        try:
            return request(url, body, method=method, timeout=max(remaining, 0.1), api_key=api_key)
        except (OSError, StatusError) as error:
            if isinstance(error, StatusError) and error.status not in (502, 503, 504):
                raise
            if deadline - time.monotonic() <= _RETRY_SECONDS:
                check()
                raise EngineError(f"{url} gave no answer within {timeout:g} s: {error or type(error).__name__}") from error
        time.sleep(_RETRY_SECONDS)


def _split(url: str) -> tuple[urllib.parse.SplitResult, str, int | None]:
    """Take an address apart, with its host and port.

    Raises:
        UsageError: It is none.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
        if parts.scheme in ("http", "https") and host:
            host.encode("idna")  # As the look-up of the name does.
            return parts, host, port
    except ValueError:  # A port that is no number up to 65535, brackets that don't match, an empty part of the host's name.
        pass
    raise UsageError(f"'{url}' is no HTTP address; expected something like http://127.0.0.1:8000/v1")


def _message(text: str) -> str:
    """Find the human part of an error body, in one line."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError:
        return " ".join(text.split())[:500]
    for key in ("error", "detail", "message"):
        if isinstance(data, dict) and key in data:
            data = data[key]
    return " ".join(str(data).split())[:500]
