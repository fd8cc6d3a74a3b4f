"""Policies that play episodes: a chat model, scripts, chance."""

from art_gym_agents.chat import ChatAgent
from art_gym_agents.random_agent import RandomAgent
from art_gym_agents.scripted import Script, ScriptedAgent

__all__ = ["ChatAgent", "RandomAgent", "Script", "ScriptedAgent"]
