"""What the train API takes and gives: requests, jobs, events and checkpoints, version 1.

Every object carries the version as `schema`. A later version of the gateway may add fields; one that changes or drops a field counts the
version up.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
    model_validator,
)

TRAIN_SCHEMA_VERSION = 1

JobState = Literal["queued", "running", "finished", "failed", "cancelled"]

TERMINAL: frozenset[str] = frozenset({"finished", "failed", "cancelled"})
"""The states that a job ends in, and the types of the events that say so."""

_LARGEST_TOKEN = 2**31 - 1


class _Taken(BaseModel):
    """Part of a request: an unknown key is an error, so that a mistyped one is never ignored."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class _Given(BaseModel):
    """Part of an answer."""

    model_config = ConfigDict(use_attribute_docstrings=True, populate_by_name=True)


class TrainConfig(_Taken):
    """How a job trains. What isn't given is as the gateway was started with."""

    learning_rate: PositiveFloat | None = Field(default=None, le=1.0, examples=[1e-4])
    """Of Adam, constant within the job."""
    advantage: Literal["group_std", "group_mean", "batch_std", "leave_one_out"] | None = Field(default=None, examples=["group_std"])
    """How an episode's return is compared: minus its group's mean, divided by the standard deviation of the group (`group_std`, GRPO), of the
    whole batch (`batch_std`) or by nothing (`group_mean`, Dr. GRPO); or minus the mean of the group's others (`leave_one_out`, RLOO)."""
    credit: Literal["episode", "turn"] | None = Field(default=None, examples=["episode"])
    """Whether all sampled tokens get their episode's advantage, or that of the rewards from their turn on."""
    discount: float | None = Field(default=None, ge=0, le=1, examples=[1.0])
    """What a reward is worth one turn earlier; with credit `turn` only."""
    loss: Literal["dapo", "cispo", "vespo", "grpo", "sapo", "dr_grpo", "luspo", "bnpo"] | None = Field(default=None, examples=["dapo"])
    """The loss, by TRL's name."""
    ratio_level: Literal["token", "sequence"] | None = Field(default=None, examples=["token"])
    """Whether the probability ratio is each token's own, or the sequence's geometric mean (GSPO)."""
    kl_coef: NonNegativeFloat | None = Field(default=None, le=100, examples=[0.0])
    """Weight of the divergence from the model without its adapter."""
    entropy_coef: float | None = Field(default=None, ge=-10, le=10, examples=[0.0])
    """Weight of the mean entropy of the sampled tokens' distributions, which is added to what is maximised."""
    clip_low: float | None = Field(default=None, gt=0, lt=1, examples=[0.2])
    """How far below 1 the probability ratio may go before its gradient is cut."""
    clip_high: PositiveFloat | None = Field(default=None, le=1000, examples=[0.28])
    """How far above 1; with loss `cispo` the largest ratio, at least 1."""
    importance_correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = Field(
        default=None, examples=["none"]
    )
    """Whether the ratio is taken to the trainer's own probabilities, at the cost of a pass, and the sampler's difference corrected apart."""
    importance_max: PositiveFloat | None = Field(default=None, le=1000, examples=[3.0])
    """Where that correction is cut."""
    optimiser_steps: PositiveInt | None = Field(default=None, le=1024, examples=[8])
    """Most optimiser steps; the groups are dealt out to them as evenly as can be, so that there are never more steps than groups."""
    max_grad_norm: PositiveFloat | None = Field(default=None, le=1e6, examples=[1.0])
    """Gradients are scaled down to this norm."""
    token_budget: PositiveInt | None = Field(default=None, le=2**24, examples=[8192])
    """Most different tokens in one forward and backward pass, which bounds the memory; it changes nothing of what is computed."""
    realign: bool | None = Field(default=None, examples=[False])
    """Whether a turn whose prompt only spells its context in other tokens is appended to its sequence all the same, rather than forked."""
    temperature: PositiveFloat | None = Field(default=None, le=2, examples=[1.0])
    """What the episodes were sampled at. By default what was recorded; another value than that is refused."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.discount not in (None, 1.0) and self.credit == "episode":
            raise ValueError("discount acts on the rewards of turns; set credit to turn, or leave discount out")
        if self.loss == "cispo" and self.clip_high is not None and self.clip_high < 1:
            raise ValueError("clip_high is the largest ratio with loss cispo; give at least 1, such as 5")
        return self


TokenId = Annotated[int, Field(ge=0, le=_LARGEST_TOKEN)]


class InlineTurn(BaseModel):
    """One answer of the policy, exactly as it was sampled. Keys of a recorded turn that training doesn't need are taken and ignored."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True, allow_inf_nan=False)

    prompt_ids: list[TokenId] | None = Field(default=None, examples=[[1, 4093, 198]])
    """Token ids of the whole prompt."""
    completion_ids: list[TokenId] | None = Field(default=None, examples=[[504, 3575, 2]])
    """Token ids as sampled, the end token included."""
    logprobs: list[Annotated[float, Field(le=1e-3)]] | None = Field(default=None, examples=[[-0.31, -1.2, -0.01]])
    """Log-probability of each of them under the distribution sampled from, in nats."""
    reward: float = Field(default=0.0, ge=-1e9, le=1e9)
    """What the turn earned."""
    policy: str = Field(default="", max_length=200, examples=["smollm2-135m@3"])
    """The version that answered."""
    temperature: PositiveFloat = Field(default=1.0, le=2)
    """What it was sampled with."""


class InlineEpisode(BaseModel):
    """An episode that the gateway didn't capture, such as one that art_gym's Runner recorded: `Episode.to_dict()` is one.

    Keys that training doesn't need are taken and ignored.
    """

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True, allow_inf_nan=False)

    id: str | None = Field(default=None, min_length=1, max_length=200, examples=["mine-1"])
    """Names it in messages; unique within the request. By default its place."""
    turns: list[InlineTurn] = Field(max_length=10_000)
    """In order."""
    reward: float | None = Field(default=None, ge=-1e9, le=1e9, examples=[1.0])
    """The return, where no turn has a reward of its own; it then counts for the last turn. Otherwise it must be their sum."""
    failure: dict[str, Any] | None = None
    """Not null for an episode that failed: it stays out of its group's baseline."""
    shared_turns: NonNegativeInt = 0
    """How many of its first turns another episode sampled; they are context here and not trained on."""

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.shared_turns > len(self.turns):
            raise ValueError(f"shared_turns is {self.shared_turns} of {len(self.turns)} turns; give at most as many as there are")
        total = sum(turn.reward for turn in self.turns)
        rewarded = any(turn.reward for turn in self.turns)
        if self.reward is not None and rewarded and abs(self.reward - total) > 1e-6 * max(1.0, abs(total)):
            raise ValueError(f"reward is {self.reward:g}, and the rewards of the turns add up to {total:g}; give one of them, or equal ones")
        return self


EpisodeId = Annotated[str, Field(min_length=1, max_length=200)]

# Told apart by their type, so that an error speaks of what was meant.
_Episode = Annotated[
    Annotated[EpisodeId, Tag("id")] | Annotated[InlineEpisode, Tag("episode")],
    Discriminator(lambda value: "id" if isinstance(value, str) else "episode"),
]


class TrainRequest(_Taken):
    """Train on groups of episodes: each group's are compared with one another, so they should be attempts at the same thing."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"groups": [["ep-1", "ep-2"], ["ep-3", "ep-4"]], "config": {"learning_rate": 1e-4}}]}
    )

    groups: list[Annotated[list[_Episode], Field(min_length=1, max_length=1024)]] = Field(min_length=1, max_length=4096)
    """Groups of ids of finished episodes, or of episodes in full. A group needs two at least; no episode may be given twice."""
    config: TrainConfig = TrainConfig()
    """How to train."""
    dry_run: bool = False
    """Check everything and start nothing; answered with 200 and what would be trained on."""


class Batch(_Given):
    """What a job trains on."""

    groups: int = Field(examples=[2])
    """Groups given."""
    episodes: int = Field(examples=[4])
    """Episodes in them."""
    failed_episodes: int = Field(examples=[0])
    """Those that failed or expired, which stay out of their groups."""
    turns: int = Field(examples=[9])
    """Answers of the policy in the other ones."""
    sampled_tokens: int = Field(examples=[311])
    """Tokens that the policy sampled in them."""
    temperature: float = Field(examples=[1.0])
    """What they were sampled at."""
    policies: dict[str, int] = Field(examples=[{"smollm2-135m@0": 9}])
    """How many turns each version answered."""


class DryRun(_Given):
    """The answer to a request with `dry_run`."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    """Version of this object."""
    dry_run: Literal[True] = True
    batch: Batch
    """What would be trained on."""


class Job(_Given):
    """A training job."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    """Version of this object."""
    id: str = Field(examples=["job-5f0c0f2e5c0b4a0f9d0a3f0d3d1b2a4c"])
    """Names it."""
    state: JobState
    """`queued` and `running` go on; `finished`, `failed` and `cancelled` are final."""
    created: float = Field(examples=[1767225600.0])
    """When it was accepted, in seconds since 1970."""
    started: float | None = None
    """When it began to run."""
    ended: float | None = None
    """When it reached its final state."""
    config: dict[str, Any] = Field(examples=[{"learning_rate": 1e-4}])
    """What the request set."""
    batch: Batch
    """What it trains on."""
    step: int | None = Field(default=None, examples=[1])
    """The number of the checkpoint and of the version that it made; null until it has, or where it made none."""
    version: str | None = Field(default=None, examples=["smollm2-135m@1"])
    """That version's name."""
    reason: str | None = None
    """Why it failed, was cancelled, or took no step."""
    advice: str | None = None
    """What to do about that."""
    last_event: int = Field(default=0, examples=[4])
    """The number of its newest event."""
    events_url: str = Field(examples=["/train/job-5f0c0f2e5c0b4a0f9d0a3f0d3d1b2a4c/events"])
    """Where its events are."""


class JobList(_Given):
    """Jobs, the newest first."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    """Version of this object."""
    jobs: list[Job]


class _Event(_Given):
    schema_version: Literal[1] = Field(default=1, alias="schema")
    """Version of this object."""
    number: PositiveInt
    """Counts a job's events from 1; to go on after it, send it as `Last-Event-ID`."""
    job: str
    """The job's id."""
    time: float
    """In seconds since 1970."""


class QueuedEvent(_Event):
    """The job was accepted. Always the first event."""

    type: Literal["queued"] = "queued"
    ahead: int = Field(examples=[0])
    """How many jobs were before it."""


class StartedEvent(_Event):
    """It began to run."""

    type: Literal["started"] = "started"
    version: str = Field(examples=["smollm2-135m@0"])
    """The version that it trains from."""
    step: int = Field(examples=[1])
    """The number of the version that it is to make."""
    batch: Batch
    """What it trains on."""


class StepEvent(_Event):
    """An optimiser step was taken. Means are over the step's sampled tokens; null where there is no such figure, or it isn't finite."""

    type: Literal["step"] = "step"
    optimiser_step: int = Field(examples=[1])
    """Its number within the job, from 1."""
    optimiser_steps: int = Field(examples=[8])
    """How many the job takes."""
    loss: float | None
    """Of the step."""
    gradient_norm: float | None
    """Before it was cut to `max_grad_norm`."""
    entropy: float | None
    """Of the distributions that the tokens were drawn from, in nats."""
    kl_sampler: float | None
    """Divergence of the policy from the version that sampled, in nats."""
    kl_reference: float | None
    """Divergence from the model without its adapter, in nats; null with `kl_coef` 0."""
    clip_fraction: float | None
    """Share of the tokens whose probability ratio was cut."""
    logprob_difference: float | None
    """Mean absolute difference between the policy's log-probabilities and the recorded ones, in nats. In the first step of a job on fresh
    episodes it is the difference between engine and trainer, and should be well under 0.02."""
    learning_rate: float
    """Of the step."""
    tokens: int
    """Sampled tokens trained on."""
    seconds: float
    """Wall time."""


class PublishedEvent(_Event):
    """The new version answers calls: from here on every call under the public name is served by it."""

    type: Literal["published"] = "published"
    step: int = Field(examples=[1])
    """Its number."""
    version: str = Field(examples=["smollm2-135m@1"])
    """Its name."""
    difference: float
    """Mean absolute difference between the engine's and the trainer's log-probabilities on a probe, in nats: the proof."""
    seconds: float
    """Wall time of writing, loading and proving."""
    drained_seconds: float
    """How long calls had to wait for it."""


class FinishedEvent(_Event):
    """The job is done. Terminal."""

    type: Literal["finished"] = "finished"
    step: int | None
    """The version's number; null where there was nothing to learn, and nothing was changed."""
    version: str = Field(examples=["smollm2-135m@1"])
    """The version that answers."""
    optimiser_steps: int
    """How many were taken."""
    reason: str | None = None
    """Why none was taken."""
    advice: str | None = None
    """What to do about that."""
    warnings: list[str] = []
    """Figures beyond their limits, each with what to do."""
    figures: dict[str, Any] = {}
    """The job's figures, those of a row of a run's `metrics.jsonl`: loss, entropy, forks and their causes, groups left out…"""
    seconds: float
    """From start to end."""


class FailedEvent(_Event):
    """The job failed; the version that answered before goes on answering. Terminal."""

    type: Literal["failed"] = "failed"
    reason: str
    """What happened."""
    advice: str
    """What to do about it."""


class CancelledEvent(_Event):
    """The job was cancelled; nothing was changed. Terminal."""

    type: Literal["cancelled"] = "cancelled"
    reason: str
    """Who cancelled it."""


class Heartbeat(_Given):
    """Sent in NDJSON streams while nothing else happens; it has no number. Streams of server-sent events send a comment instead."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    type: Literal["heartbeat"] = "heartbeat"
    job: str
    time: float


Event = Annotated[
    QueuedEvent | StartedEvent | StepEvent | PublishedEvent | FinishedEvent | FailedEvent | CancelledEvent | Heartbeat,
    Field(discriminator="type"),
]


class Checkpoint(_Given):
    """A version of the policy that is kept on disk."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    """Version of this object."""
    step: int = Field(examples=[1])
    """Its number; 0 is the policy that the gateway was first started with, which is always there."""
    version: str = Field(examples=["smollm2-135m@1"])
    """Its name."""
    active: bool
    """Whether calls under the public name are answered by it."""
    served: bool
    """Whether it can be called by its own name now."""
    created: float | None = None
    """When it was written, in seconds since 1970."""
    job: str | None = None
    """The job that made it."""
    figures: dict[str, Any] = {}
    """That job's figures."""


class CheckpointList(_Given):
    """The checkpoints, the oldest first."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    """Version of this object."""
    active: int
    """The step that answers."""
    checkpoints: list[Checkpoint]
