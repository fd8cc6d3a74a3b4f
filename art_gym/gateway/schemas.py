"""What the episodes API takes and gives, version 1.

Every object carries the version as `schema`. A later version of the gateway may add fields; one that changes or drops a field counts the
version up.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from art_gym.gateway._store_tables import EpisodeRecord, EpisodeState

SCHEMA_VERSION: Literal[1] = 1

_LARGEST_FIGURE = 1e12
_MOST_NESTED = 32
_MOST_DATA_BYTES = 2**20

_EXAMPLE_ID = "ep-Zr2mZ0m1Tq2oX9v7yQ3kTA"


def _storable(value: dict[str, Any] | None) -> dict[str, Any] | None:
    """Refuse what JSON can't tell of, and what would take too long to."""
    if value is None:
        return None
    if _depth(value, _MOST_NESTED) > _MOST_NESTED:
        raise ValueError(f"it may be nested {_MOST_NESTED} levels deep")
    try:
        size = len(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())
    except UnicodeEncodeError as error:
        raise ValueError("it has half a surrogate pair in it, which is no text") from error
    except ValueError as error:
        raise ValueError("it has NaN or Infinity in it, which JSON doesn't know") from error
    if size > _MOST_DATA_BYTES:
        raise ValueError(f"it may have {_MOST_DATA_BYTES} bytes as JSON, and has {size}")
    return value


def _depth(value: Any, most: int) -> int:
    if not isinstance(value, dict | list) or most < 0:
        return 0
    return 1 + max((_depth(one, most - 1) for one in (value.values() if isinstance(value, dict) else value)), default=0)


Data = Annotated[dict[str, Any], AfterValidator(_storable)]
"""A JSON object of the user's own: at most 1 MiB, 32 levels deep."""

Figure = Annotated[float, Field(ge=-_LARGEST_FIGURE, le=_LARGEST_FIGURE, allow_inf_nan=False)]
"""A finite number."""

Label = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
"""One line."""

Reason = Annotated[str, StringConstraints(min_length=1, max_length=10_000)]

Figures = Annotated[dict[Label, Figure], Field(max_length=200)]


class _Taken(BaseModel):
    """A request: an unknown key is an error, so that a mistyped one is never ignored."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, populate_by_name=True)


class _Given(BaseModel):
    """Part of an answer."""

    model_config = ConfigDict(use_attribute_docstrings=True, populate_by_name=True)


class NewEpisode(_Taken):
    """Begins an episode. Everything is optional."""

    group: Label | None = Field(default=None, examples=["q17"])
    """Episodes of one group are attempts at one task; training compares them with each other."""
    scenario: Data | None = Field(default=None, examples=[{"question": "When does the gate close?"}])
    """What the task is, as the user knows it; at most 1 MiB. Kept with the episode, and not read by the gateway."""
    metadata: Data = Field(default={}, examples=[{"agent": "mail-2"}])
    """Anything to find again with the episode; at most 1 MiB. It doesn't reach training."""


class Reward(_Taken):
    """Adds to an episode's reward. What comes again under the same name adds up; a metric takes the place of the one before."""

    reward: Figure | None = Field(default=None, examples=[1.0])
    """The reward; without it the sum of `rewards`, if there are any."""
    rewards: Figures = Field(default={}, examples=[{"found": 0.5}])
    """Named parts of the reward, for the record."""
    metrics: Figures = Field(default={}, examples=[{"success": 1.0}])
    """Figures that aren't reward. `success` says whether the episode succeeded: above 0 it did; without it a positive reward means that."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if type(self) is Reward and self.reward is None and not self.rewards and not self.metrics:
            raise ValueError("give a reward, rewards or metrics")
        return self


class Finish(Reward):
    """Ends an episode."""

    failure: Reason | None = Field(default=None, examples=["TimeoutError: no answer"])
    """Why the episode failed, if it did. A failed episode is kept and stays out of training."""


class EpisodeObject(_Given):
    """An episode."""

    schema_: Literal[1] = Field(default=SCHEMA_VERSION, alias="schema", examples=[SCHEMA_VERSION])
    """The version of this schema."""
    id: str = Field(examples=[_EXAMPLE_ID])
    """The episode's id."""
    base_url: str = Field(examples=[f"http://127.0.0.1:8000/episodes/{_EXAMPLE_ID}/v1"])
    """For any OpenAI client; what is asked there is captured."""
    model: str = Field(examples=["policy"])
    """The policy's public name, for clients that must give a model."""
    group: str | None = Field(default=None, examples=["q17"])
    """As it was created."""
    scenario: dict[str, Any] | None = Field(default=None, examples=[{"question": "When does the gate close?"}])
    """As it was created."""
    metadata: dict[str, Any] = Field(default={}, examples=[{"agent": "mail-2"}])
    """As it was created."""
    state: EpisodeState = Field(examples=["finished"])
    """`open` takes calls; `finished` and `failed` were ended by their client; `expired` grew too old without being ended."""
    reward: float | None = Field(default=None, examples=[1.0])
    """The sum of all rewards that were given; null if none was."""
    rewards: dict[str, float] = Field(default={}, examples=[{"found": 0.5}])
    """The named parts, each summed up."""
    metrics: dict[str, float] = Field(default={}, examples=[{"success": 1.0}])
    """Figures that aren't reward."""
    failure: str | None = Field(default=None, examples=[None])
    """Why it failed."""
    calls: int = Field(examples=[4])
    """How many calls were captured; with n > 1 each choice is one."""
    tokens: int = Field(examples=[212])
    """How many tokens were sampled in them."""
    created: float = Field(examples=[1764572400.0])
    """When, in seconds since 1970."""
    finished: float | None = Field(default=None, examples=[1764572460.5])
    """When it was ended, in seconds since 1970; null while it is open."""


class CreatedEpisode(EpisodeObject):
    """A new episode, with its key."""

    api_key: str = Field(examples=["agk-ep-5f0c0f2e5c0b4a0f9d0a3f0d3d1b2a4c"])
    """Opens this episode alone: its calls, and its record. It is shown here only."""


class CapturedCall(_Given):
    """One answer of the policy, as it was captured."""

    id: str = Field(examples=["call-5f0c0f2e5c0b4a0f9d0a3f0d3d1b2a4c"])
    """Unique; the choices of one request differ in what comes after the last dash."""
    kind: Literal["chat", "completions", "responses"] = Field(examples=["chat"])
    """The endpoint."""
    messages: list[dict[str, Any]] = Field(examples=[[{"role": "user", "content": "Hello"}]])
    """The conversation that was sent, as chat messages."""
    tools: list[dict[str, Any]] = Field(examples=[[]])
    """The tools that were offered."""
    action: dict[str, Any] = Field(examples=[{"role": "assistant", "content": "Hello!"}])
    """What was answered."""
    finish_reason: str = Field(examples=["stop"])
    """As the endpoint said; `abandoned` if the client left before the end."""
    policy: str = Field(examples=["policy@3"])
    """The version that answered."""
    prompt_ids: list[int] | None = Field(examples=[[1, 2, 3]])
    """Token ids of the prompt, as the engine saw them."""
    completion_ids: list[int] | None = Field(examples=[[4, 5]])
    """Token ids as sampled, the end token included."""
    logprobs: list[float | None] | None = Field(examples=[[-0.1, -0.02]])
    """Log-probability of each of these."""
    temperature: float = Field(examples=[1.0])
    """What it was sampled with."""
    began: float = Field(examples=[1764572401.0])
    """When the request arrived, in seconds since 1970."""
    seconds: float = Field(examples=[0.8])
    """From then until the last token."""
    abandoned: bool = Field(examples=[False])
    """The client left before the end."""


class EpisodeWithCalls(EpisodeObject):
    """An episode, with its calls if they were asked for."""

    captured: list[CapturedCall] | None = Field(default=None)
    """The calls in the order of arrival; only with `include=calls`."""


class EpisodeList(_Given):
    """A page of episodes, in the order of their creation."""

    schema_: Literal[1] = Field(default=SCHEMA_VERSION, alias="schema", examples=[SCHEMA_VERSION])
    """The version of this schema."""
    episodes: list[EpisodeObject]
    """At most `limit`."""
    next: int | None = Field(default=None, examples=[100])
    """What `after` must be for the page that follows; null if this is the last."""


class Deleted(_Given):
    """Tells that an episode is gone."""

    schema_: Literal[1] = Field(default=SCHEMA_VERSION, alias="schema", examples=[SCHEMA_VERSION])
    """The version of this schema."""
    id: str = Field(examples=[_EXAMPLE_ID])
    """The episode's id."""
    deleted: Literal[True] = Field(default=True, examples=[True])
    """Always true."""


class ErrorDetail(_Given):
    """What went wrong."""

    message: str = Field(examples=["There is no episode 'ep-x': it was deleted, or never created."])
    """What happened, and the way out."""
    type: str = Field(examples=["NotFoundError"])
    """The kind of error."""
    param: str | None = Field(default=None, examples=[None])
    """The part of the request that is at fault."""
    code: int = Field(examples=[404])
    """The HTTP status."""


class ErrorObject(_Given):
    """An error, in OpenAI's form."""

    error: ErrorDetail
    """What went wrong."""


def episode_data(record: EpisodeRecord, base_url: str, model: str) -> dict[str, Any]:
    """The JSON data of an `EpisodeObject`."""
    return {
        "schema": SCHEMA_VERSION,
        "id": record.id,
        "base_url": base_url,
        "model": model,
        "group": record.group,
        "scenario": record.scenario,
        "metadata": record.metadata,
        "state": record.state,
        "reward": record.reward,
        "rewards": record.rewards,
        "metrics": record.metrics,
        "failure": record.failure,
        "calls": record.calls,
        "tokens": record.tokens,
        "created": record.created,
        "finished": record.finished,
    }
