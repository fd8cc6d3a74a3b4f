"""Rollouts: many episodes of one environment, played at once by one agent."""

from art_gym.rollout.agent import Agent, Reply, TurnState
from art_gym.rollout.progress import Progress, Tally, show_progress
from art_gym.rollout.runner import Runner

__all__ = ["Agent", "Progress", "Reply", "Runner", "Tally", "TurnState", "show_progress"]
