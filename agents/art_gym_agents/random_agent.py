"""The random policy: actions drawn from the environment's action space."""

from __future__ import annotations

from copy import deepcopy

from art_gym.rollout.agent import Reply, TurnState

_SPACE = "random_agent.space"


class RandomAgent:
    """Plays uniformly drawn well-formed calls; the same ones for an equal scenario and member."""

    def __init__(self, *, name: str = "random") -> None:
        self.name = name

    async def act(self, state: TurnState) -> Reply:
        space = state.memory.get(_SPACE)
        if space is None:
            # A copy: the environment's own space may be shared between episodes, and with it the generator.
            space = state.memory[_SPACE] = deepcopy(state.action_space)
            space.seed(int(state.rng.integers(2**31)))
        return Reply(action=space.sample(), policy=self.name)

    async def close(self) -> None:
        """Nothing to release."""
