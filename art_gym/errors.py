"""The error model of art_gym, whole.

Who must act on an error decides its class:

* `ToolError`: the **model**. Raised by a tool; its text becomes that call's result and the episode goes on.
* `UsageError` and its subclasses: the **user**. A wrong name, option, file or missing package. The command line prints it as one line and
  exits with code 2. Every text says what happened, what was expected, and the way out.
* `EpisodeError` and its subclasses: **nobody at once**. One episode failed; the runner records the failure with its `kind` and the other
  episodes go on.
* `TooManyFailures`: the **user**. So many episodes failed that the rest would be wasted.
* `RunStopped`: the **user**, later. A run ended itself in order, since its configuration says so; the command line exits with code 3.
* Any other exception raised inside an environment is a bug of that environment: the runner records it as a failure of kind `environment`,
  with its traceback.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Literal, get_args

FailureKind = Literal["environment", "tool_timeout", "policy", "engine", "cancelled"]
"""Why an episode could not be finished. Failed episodes are kept as data and stay out of their group's baseline."""

FAILURE_KINDS: tuple[FailureKind, ...] = get_args(FailureKind)


class ArtGymError(Exception):
    """Base of every error that art_gym raises on purpose."""


class ToolError(ArtGymError):
    """Raised by a tool to tell the model what went wrong; the text becomes the call's result."""


class UsageError(ArtGymError):
    """The user asked for something that can't be done; the text is one line and names the way out."""


class MissingExtra(UsageError):
    """A part of art_gym needs packages that aren't installed."""

    def __init__(self, needs: str, *, extra: str, package: str) -> None:
        super().__init__(f"{needs} needs the package '{package}', which isn't installed: pip install 'art-gym[{extra}]'")
        self.needs = needs
        self.extra = extra
        self.package = package

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(MissingExtra, extra=self.extra, package=self.package), (self.needs,)


class MissingTokens(UsageError):
    """A turn has no token ids or logprobs, so that it can be evaluated but not trained on."""


class RunStopped(ArtGymError):
    """An alarm ended a training run after a batch's checkpoint; the text names the figure, its limit and the way to go on."""


class TooManyFailures(ArtGymError):
    """A rollout was ended since more of its episodes failed than its `max_failure_rate` allows; the text tells of which kinds they are."""


class EpisodeError(ArtGymError):
    """One episode can't go on. `kind` says why; the runner records it."""

    kind: ClassVar[FailureKind] = "environment"

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details


class ToolTimeout(EpisodeError):
    """A tool call ran past its time limit. The call may still run and change the environment, which can't be reset before it is over."""

    kind = "tool_timeout"


class EnvironmentDied(EpisodeError):
    """The process that held an environment is gone; the text says how it ended."""


class PolicyError(EpisodeError):
    """The policy's endpoint answered with an error after bounded retries."""

    kind = "policy"


class EngineError(EpisodeError):
    """The inference engine could not be started, or died. The text carries the tail of its log."""

    kind = "engine"


class ContextOverflow(ArtGymError):
    """The conversation no longer fits the model's context. The runner ends the episode as truncated, with the reward earned so far."""
