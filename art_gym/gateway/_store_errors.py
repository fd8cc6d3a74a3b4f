"""What the store refuses, each an answer to the client that asked for it."""

from __future__ import annotations

from art_gym.gateway._errors import ApiError


class UnknownEpisode(ApiError):
    """There is no such episode."""

    def __init__(self, id: str) -> None:
        super().__init__(404, f"There is no episode {id!r:.80}: it was deleted, or never created.")


class EpisodeOver(ApiError):
    """The episode's state doesn't allow it."""

    def __init__(self, message: str) -> None:
        super().__init__(409, message)


class LimitExceeded(ApiError):
    """One of the gateway's limits is reached; the text names it."""

    def __init__(self, message: str, status: int = 409) -> None:
        super().__init__(status, message)


class IdempotencyConflict(ApiError):
    """An idempotency key came back with another request."""

    def __init__(self) -> None:
        super().__init__(422, "This Idempotency-Key was used for another request; give each request a key of its own.", param="Idempotency-Key")


class StoreUnwritable(ApiError):
    """The store can't be written, such as to a full disk."""

    def __init__(self, message: str) -> None:
        super().__init__(503, message, headers={"Retry-After": "5"})


class UnknownJob(ApiError):
    """There is no such job."""

    def __init__(self, id: str) -> None:
        super().__init__(404, f"There is no job {id!r:.80}.")
