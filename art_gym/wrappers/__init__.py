"""Wrappers around environments of messages, as Gymnasium wrappers.

They work around any Gymnasium environment of messages, in any order, and beside Gymnasium's own. Their state is part of `snapshot`.
"""

from art_gym.wrappers.limits import TokenLimit, TurnLimit
from art_gym.wrappers.recording import Record
from art_gym.wrappers.redaction import Redact
from art_gym.wrappers.rewards import AddReward, Step
from art_gym.wrappers.selection import SelectTools
from art_gym.wrappers.transcript import Transcript

__all__ = ["AddReward", "Record", "Redact", "SelectTools", "Step", "TokenLimit", "Transcript", "TurnLimit"]
