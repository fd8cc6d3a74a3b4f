"""The gateway: a drop-in OpenAI endpoint that captures, rewards and trains agents that already exist.

The server's names need the extra `gateway`; they are imported when they are first asked for, so that a client needs none of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from art_gym.errors import MissingExtra

if TYPE_CHECKING:
    from art_gym.gateway.app import create_app
    from art_gym.gateway.calls import Call, episode_of
    from art_gym.gateway.client import (
        AsyncClient,
        AsyncClientEpisode,
        Client,
        ClientEpisode,
        GatewayError,
        Played,
        PlayedGroup,
        Rollout,
        Trained,
        TrainingFailed,
    )
    from art_gym.gateway.external import ExternalAgent, ExternalEpisode
    from art_gym.gateway.policy import PolicyState
    from art_gym.gateway.settings import GatewaySettings, Limits, Sampling

_HOMES = {
    "AsyncClient": "client",
    "AsyncClientEpisode": "client",
    "Call": "calls",
    "Client": "client",
    "ClientEpisode": "client",
    "ExternalAgent": "external",
    "ExternalEpisode": "external",
    "GatewayError": "client",
    "GatewaySettings": "settings",
    "Limits": "settings",
    "Played": "client",
    "PlayedGroup": "client",
    "PolicyState": "policy",
    "Rollout": "client",
    "Sampling": "settings",
    "Trained": "client",
    "TrainingFailed": "client",
    "create_app": "app",
    "episode_of": "calls",
}

__all__ = [
    "AsyncClient",
    "AsyncClientEpisode",
    "Call",
    "Client",
    "ClientEpisode",
    "ExternalAgent",
    "ExternalEpisode",
    "GatewayError",
    "GatewaySettings",
    "Limits",
    "Played",
    "PlayedGroup",
    "PolicyState",
    "Rollout",
    "Sampling",
    "Trained",
    "TrainingFailed",
    "create_app",
    "episode_of",
]


def __getattr__(name: str) -> Any:
    if (home := _HOMES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("art_gym"):
            raise
        raise MissingExtra("the gateway", extra="gateway", package=error.name) from error
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
