"""Bundled tasks; importing this package registers them with Gymnasium."""

from art_gym import register
from art_gym_envs.guess_number import GuessNumber
from art_gym_envs.lookup import Lookup

register("art_gym/GuessNumber-v0", "art_gym_envs.guess_number:GuessNumber")
register("art_gym/Lookup-v0", "art_gym_envs.lookup:Lookup")

__all__ = ["GuessNumber", "Lookup"]
