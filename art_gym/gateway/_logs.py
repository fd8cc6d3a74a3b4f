"""Structured logs: one JSON object a line, with the id of the request it belongs to, and never a secret."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Of the request that is being answered."""

_SECRETS = re.compile(r"agk-ep-[0-9A-Za-z]+|(?i:bearer)\s+[^\s\"'\\,]+")
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class JsonFormatter(logging.Formatter):
    """Formats records as JSON objects: time, level, logger, message, request_id, whatever was given as `extra`, and the traceback.

    Args:
        secrets: Texts that are replaced wherever they turn up. Episode keys and bearer tokens always are.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__()
        # As they look within JSON; the longest first, as one may be part of another.
        self._secrets = sorted((json.dumps(one)[1:-1] for one in secrets if one), key=len, reverse=True)

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        data: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (id := request_id.get()) is not None:
            data["request_id"] = id
        data.update((name, value) for name, value in vars(record).items() if name not in _OWN)
        if record.exc_info:
            data["traceback"] = self.formatException(record.exc_info)
        line = json.dumps(data, default=str)
        for secret in self._secrets:
            if secret in line:
                line = line.replace(secret, "[key]")
        # Looked for only where one can be, since a line is written for each request.
        return _SECRETS.sub("[key]", line) if "agk-ep-" in line or "earer" in line.lower() else line


def configure_logs(secrets: Iterable[str] = (), *, level: int = logging.INFO, stream: TextIO | None = None) -> logging.Handler:
    """Let the gateway's and the server's loggers write JSON lines; returns the handler, so that it can be taken away again.

    Args:
        secrets: The keys of the settings.
        level: What is less important isn't written.
        stream: Where to; by default standard error.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(secrets))
    for name in ("art_gym", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False
    for name in ("uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers = []
    # The gateway writes a line for each request itself, without its query.
    logging.getLogger("uvicorn.access").propagate = False
    return handler
