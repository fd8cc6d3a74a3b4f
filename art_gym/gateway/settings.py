"""The gateway's settings: where it listens, what it stands before, who may use it, and how much of it."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

from art_gym.errors import UsageError

SHORTEST_KEY = 16
"""Characters that an API key has at least."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Sampling(_Settings):
    """How the policy samples within episodes, whatever the client asks for: the trainer has one temperature and corrects for nothing else.

    The other settings are such that they change nothing.
    """

    temperature: float = Field(default=1.0, gt=0, le=2)
    """The trainer uses the same."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)


class Limits(_Settings):
    """What a client may use up; what goes beyond is refused with a 4xx answer that names the limit."""

    body_bytes: int = Field(default=32 * 2**20, ge=1)
    """The longest request body."""
    header_bytes: int = Field(default=64 * 2**10, ge=1)
    """The longest head of a request: its line and all its headers."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Of one key, or of one address where no key is asked for. None: as many as come."""
    concurrent_calls: int = Field(default=2048, ge=1)
    """Calls of the policy under way at a time, in all."""
    calls_per_episode: int = Field(default=1000, ge=1)
    episode_bytes: int = Field(default=64 * 2**20, ge=1)
    """Of the stored calls of one episode."""
    episode_age_seconds: float = Field(default=24 * 3600.0, gt=0)
    """How long an episode may be open; then it expires."""
    open_episodes: int = Field(default=10_000, ge=1)
    """Episodes that were created and not finished."""


class GatewaySettings(_Settings):
    """Everything that a gateway is started with.

    Raises:
        UsageError: It would listen on a public address without API keys; a key is too short or can't be sent; the upstream is no address; the
            model's name can't be one.
    """

    upstream: str
    """The base URL of the vLLM server, such as "http://127.0.0.1:8001/v1"."""
    model: str
    """The policy's public name; version 12 is `name@12`."""
    folder: Path
    """Where episodes and jobs are stored."""
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    public_url: str | None = None
    """The address that clients know the gateway by, if another one (a reverse proxy's); base URLs that it hands out begin with it."""
    upstream_key: SecretStr | None = None
    """Sent to the vLLM server as a bearer token; a client's key never is."""
    api_keys: tuple[SecretStr, ...] = ()
    """Any of them opens the whole gateway; without one everybody who can reach it may use it."""
    aliases: tuple[str, ...] = ()
    """Other names under which clients may ask for the current version, such as one written into an agent's source; "*" takes any."""
    capture_all: bool = False
    """Make an episode of each call that belongs to none."""
    sampling: Sampling | None = Sampling()
    """How captured calls are sampled. None: as the client asks; such episodes can be trained on only if they asked for the same."""
    limits: Limits = Limits()
    connect_seconds: float = Field(default=10.0, gt=0)
    """How long the vLLM server may take to accept a connection."""
    answer_seconds: float = Field(default=1800.0, gt=0)
    """How long a call may take in all."""
    silence_seconds: float = Field(default=600.0, gt=0)
    """How long the vLLM server may say nothing within a call."""
    drain_seconds: float = Field(default=60.0, ge=0)
    """How long calls may go on when the weights they are sampled with are about to be written over; then they are cut short."""

    @classmethod
    def of(cls, **values: Any) -> GatewaySettings:
        """Make settings of what a user gave, with one line for whatever is wrong with it.

        Raises:
            UsageError: A value can't be right.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(str(part) for part in first["loc"])
            shown = "" if "key" in name else f", not {first['input']!r:.100}"
            raise UsageError(f"the gateway's setting {name or 'as a whole'} can't be used: {first['msg']}{shown}") from error

    @field_validator("upstream", "public_url")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            parts = urlsplit(value)
            known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not parts.username
        except ValueError:
            known = False
        if not known or parts.query or parts.fragment:
            raise UsageError(f"{value!r:.200} is no address; give something like http://127.0.0.1:8001/v1, with keys in settings of their own")
        return value.rstrip("/")

    @field_validator("model")
    @classmethod
    def _name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise UsageError(
                f"the model's name is {value!r:.100}; it must be letters, digits, '.', '_', '-' and '/' ('@' goes before a version)"
            )
        return value

    @field_validator("api_keys")
    @classmethod
    def _keys(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for number, key in enumerate((one.get_secret_value() for one in keys), 1):
            if not (key.isascii() and key.isprintable() and " " not in key and len(key) >= SHORTEST_KEY):
                raise UsageError(
                    f"API key {number} of {len(keys)} can't be one: at least {SHORTEST_KEY} printable characters of ASCII, without spaces; "
                    "`openssl rand -hex 32` makes one"
                )
        return keys

    @model_validator(mode="after")
    def _not_open_to_all(self) -> GatewaySettings:
        if not self.api_keys and not is_loopback(self.host):
            raise UsageError(
                f"the gateway would listen on {self.host}, where others can reach it, and no API key is set; set one (`openssl rand -hex 32` "
                "makes one), or listen on 127.0.0.1"
            )
        return self


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address that is listened on."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
