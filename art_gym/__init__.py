"""art_gym trains LLM agents with reinforcement learning on tasks written as multi-turn Gymnasium environments."""

from art_gym._version import __version__

__all__ = ["__version__"]
