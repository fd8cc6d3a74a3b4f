"""Rollouts: many episodes of one environment, played at once by one agent."""

from art_gym.rollout.agent import Agent, Reply, ServerLoad, TurnState
from art_gym.rollout.branching import branch_at
from art_gym.rollout.gate import RequestGate
from art_gym.rollout.isolation import Isolation, Processes, Ray
from art_gym.rollout.progress import Progress, Tally, show_progress
from art_gym.rollout.runner import Runner

__all__ = [
    "Agent",
    "Isolation",
    "Processes",
    "Progress",
    "Ray",
    "Reply",
    "RequestGate",
    "Runner",
    "ServerLoad",
    "Tally",
    "TurnState",
    "branch_at",
    "show_progress",
]
