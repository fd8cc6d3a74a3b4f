"""The inference engine: a supervised vLLM server, or one that already runs somewhere.

`Engine` launches one on this machine and `AttachedEngine` uses one by its address; both are asked in the same way (`ControlledServer`).
"""

from art_gym.engine._memory import available_bytes
from art_gym.engine.attached import AttachedEngine
from art_gym.engine.config import EngineConfig
from art_gym.engine.control import ControlledServer
from art_gym.engine.server import Engine

__all__ = ["AttachedEngine", "ControlledServer", "Engine", "EngineConfig", "available_bytes"]
