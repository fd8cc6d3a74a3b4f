"""art_gym trains LLM agents with reinforcement learning on tasks written as multi-turn Gymnasium environments."""

from art_gym import _vector as _vector  # registers the spaces with Gymnasium's vector environments
from art_gym._replay import Divergence, replay
from art_gym._strict import strict_schema
from art_gym._version import __version__
from art_gym.comparison import Comparison
from art_gym.env import ToolEnv
from art_gym.episodes import Episode, EpisodeGroup, Failure, Turn, success_rate
from art_gym.errors import (
    ArtGymError,
    ContextOverflow,
    EngineError,
    EnvironmentDied,
    EpisodeError,
    MissingExtra,
    MissingTokens,
    PolicyError,
    RunStopped,
    ToolError,
    ToolTimeout,
    TooManyFailures,
    UsageError,
)
from art_gym.evaluation import Evaluation, evaluate
from art_gym.messages import AssistantMessage, Message, Observation, ToolSchema, call, calls, say
from art_gym.registration import env_ids, make, register
from art_gym.rollout import Agent, Processes, Progress, Ray, Reply, RequestGate, Runner, ServerLoad, TurnState, branch_at
from art_gym.scenarios import SPLITS, Scenario, Split, from_rows
from art_gym.spaces import ChatSpace, ToolCallSpace
from art_gym.store import EpisodeStore
from art_gym.tools import Tool, tool

__all__ = [
    "SPLITS",
    "Agent",
    "ArtGymError",
    "AssistantMessage",
    "ChatSpace",
    "Comparison",
    "ContextOverflow",
    "Divergence",
    "EngineError",
    "EnvironmentDied",
    "Episode",
    "EpisodeError",
    "EpisodeGroup",
    "EpisodeStore",
    "Evaluation",
    "Failure",
    "Message",
    "MissingExtra",
    "MissingTokens",
    "Observation",
    "PolicyError",
    "Processes",
    "Progress",
    "Ray",
    "Reply",
    "RequestGate",
    "RunStopped",
    "Runner",
    "Scenario",
    "ServerLoad",
    "Split",
    "TooManyFailures",
    "Tool",
    "ToolCallSpace",
    "ToolEnv",
    "ToolError",
    "ToolSchema",
    "ToolTimeout",
    "Turn",
    "TurnState",
    "UsageError",
    "__version__",
    "branch_at",
    "call",
    "calls",
    "env_ids",
    "evaluate",
    "from_rows",
    "make",
    "register",
    "replay",
    "say",
    "strict_schema",
    "success_rate",
    "tool",
]
