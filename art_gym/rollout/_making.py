"""How an environment is made, as something that pickles: by an id and its arguments, or by a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import gymnasium


@dataclass(frozen=True, slots=True)
class Making:
    """Makes a new instance of an environment at each call.

    Args:
        env: The environment's id, or a function that makes one.
        kwargs: Arguments of the environment, with an id only.
    """

    env: str | Callable[[], gymnasium.Env[Any, Any]]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> gymnasium.Env[Any, Any]:
        if callable(self.env):
            return self.env()
        from art_gym.registration import make

        return make(self.env, **self.kwargs)

    def preload(self) -> None:
        """Import what making one imports, as far as that is known without making one; what goes wrong goes wrong again when one is made."""
        if isinstance(self.env, str):
            from art_gym.registration import _creator, _find

            with suppress(Exception):
                _creator(_find(self.env))
