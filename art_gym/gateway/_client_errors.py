"""What a client of the gateway can be told that it can't go on with."""

from __future__ import annotations

from functools import partial
from typing import Any

from art_gym.errors import ArtGymError


class GatewayError(ArtGymError):
    """The gateway refused a request, or can't be reached.

    Attributes:
        status: The HTTP status; 0 if there was no answer.
        param: The field of the request that is at fault, where the gateway names one.
        request_id: The gateway's own name for the request, as its log has it; empty if it gave none.
    """

    def __init__(self, message: str, *, status: int = 0, param: str | None = None, request_id: str = "") -> None:
        super().__init__(message)
        self.status, self.param, self.request_id = status, param, request_id

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), status=self.status, param=self.param, request_id=self.request_id), self.args


class TrainingFailed(ArtGymError):
    """A training job ended without a new version.

    Attributes:
        reason: What happened.
        advice: What to do about it; empty if nothing is known.
        job: The job's id.
        cancelled: Somebody cancelled it.
    """

    def __init__(self, reason: str, advice: str = "", *, job: str = "", cancelled: bool = False) -> None:
        super().__init__(f"{reason}{'' if reason.endswith(('.', '!', '?')) or not advice else '.'}{f' {advice}' if advice else ''}")
        self.reason, self.advice, self.job, self.cancelled = reason, advice, job, cancelled

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(TrainingFailed, job=self.job, cancelled=self.cancelled), (self.reason, self.advice)
