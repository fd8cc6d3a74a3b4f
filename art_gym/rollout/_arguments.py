"""What a rollout is given: refused before anything is played where it can't be right, in one line with the way out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium

from art_gym.errors import UsageError
from art_gym.scenarios import Scenario
from art_gym.store import Journal


def check_env(env: Any, env_kwargs: Any) -> None:
    if isinstance(env, gymnasium.Env):
        raise UsageError(f"env must be an id or a function that makes an environment, not the instance {env}: each episode in play has its own")
    if not isinstance(env, str) and not callable(env):
        raise UsageError(f"env must be an environment's id or a function that makes one, not {env!r:.100}")
    if env_kwargs is not None and not isinstance(env_kwargs, Mapping):
        raise UsageError(f"env_kwargs must be a mapping of the environment's arguments, not {env_kwargs!r:.100}")
    if callable(env) and env_kwargs:
        raise UsageError("env_kwargs go with an environment's id; a function that makes the environment passes its own")


def check_agent(agent: Any) -> None:
    if isinstance(agent, type):
        raise UsageError(f"agent must be an instance, not the class {agent.__name__}: make one, {agent.__name__}(…)")
    if missing := [name for name in ("name", "act", "close") if not hasattr(agent, name)]:
        raise UsageError(
            f"agent is {agent!r:.100}, without {', '.join(missing)}; an agent has a name, async def act(state) and async def close()"
        )


def check_run(scenarios: Any, journal: Any, progress: Any) -> None:
    if not hasattr(scenarios, "__iter__"):
        raise UsageError(f"scenarios must be an iterable of art_gym.Scenario objects, not {scenarios!r:.100}: a list, or a generator")
    if journal is not None and not isinstance(journal, Journal):
        raise UsageError(f"journal must be a Journal, such as EpisodeStore(folder).journal(label), not {journal!r:.100}")
    if progress is not None and not callable(getattr(progress, "on_episode", None)):
        raise UsageError(f"progress must have on_episode(episode), as what `with show_progress(…) as progress` gives, not {progress!r:.100}")


def check_scenario(scenario: Any) -> None:
    if not isinstance(scenario, Scenario):
        raise UsageError(f"scenarios must be art_gym.Scenario objects, not {scenario!r:.100}: write Scenario(id, seed, options)")
    if not isinstance(scenario.seed, int) or isinstance(scenario.seed, bool) or scenario.seed < 0:
        raise UsageError(f"scenario {scenario.id!r:.100} has the seed {scenario.seed!r:.100}; it must be a whole number of at least 0")
    if not isinstance(scenario.options, Mapping):
        raise UsageError(f"scenario {scenario.id!r:.100} has the options {scenario.options!r:.100}; they must be a mapping")


def check_counts(**counts: Any) -> None:
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{name} is {value!r:.100}; it must be a whole number of at least 1")


def check_seconds(**seconds: Any) -> None:
    for name, value in seconds.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise UsageError(f"{name} is {value!r:.100}; it must be a number of seconds of more than 0")


def check_oversampling(oversample: Any, branch: Any) -> None:
    if not isinstance(oversample, int) or isinstance(oversample, bool) or oversample < 0:
        raise UsageError(f"oversample is {oversample!r:.100}; it must be a whole number of episodes, 0 for none")
    if branch is not None and not callable(branch):
        raise UsageError(f"branch is {branch!r:.100}; it must be a function of an episode and its state, such as branch_at({{2: 3}})")
    if branch is not None and oversample:
        raise UsageError("oversample cuts a group's slowest episodes, whose branches others share; give either oversample or branch")


def check_priority(priority: Any) -> None:
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise UsageError(f"priority is {priority!r:.100}; it must be a whole number, of which the smallest goes first")
