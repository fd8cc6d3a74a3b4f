"""What the parts of a running gateway share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection

if TYPE_CHECKING:
    from art_gym.gateway._upstream import Upstream
    from art_gym.gateway.jobs import Jobs
    from art_gym.gateway.policy import PolicyState
    from art_gym.gateway.settings import GatewaySettings
    from art_gym.gateway.store import SessionStore


@dataclass(slots=True)
class Gateway:
    """A gateway's parts, at `app.state.gateway` while it runs.

    Attributes:
        settings: What it was started with.
        store: Episodes and jobs on disk.
        policy: Which version answers.
        upstream: The connection to vLLM.
        jobs: Trains; None where nothing can be trained.
    """

    settings: GatewaySettings
    store: SessionStore
    policy: PolicyState
    upstream: Upstream
    jobs: Jobs | None


def gateway_of(connection: HTTPConnection) -> Gateway:
    """Return the gateway that a request came to."""
    gateway: Gateway = connection.app.state.gateway
    return gateway
