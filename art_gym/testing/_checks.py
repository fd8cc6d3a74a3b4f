"""The checks of the conformance suite, one a function.

Each takes an environment's id, plays the environment from outside, returns a note on what was done ("" for none), and raises AssertionError
with one readable text where the environment breaks the contract. Which of them run, and how they are reported, belongs to
`art_gym.testing.conformance`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import json
import os
import pickle
import re
import subprocess
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import logger
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit, TransformReward

from art_gym._replay import replay
from art_gym.episodes import Episode
from art_gym.errors import ContextOverflow, UsageError
from art_gym.messages import call, say
from art_gym.registration import make
from art_gym.rollout import Reply, Runner, TurnState
from art_gym.scenarios import SPLITS, Scenario, Split
from art_gym.testing import transitions
from art_gym.testing._script import action_source
from art_gym.testing.strategies import starting_split

_STEPS = 12
_SCENARIOS = 1000
"""Of each split: as many must have ids, and seeds and options, of their own."""

_COMPARED = 20
"""Of each split: as many are taken again, here and in another process, and compared."""

_PICKLED = 5
_EPISODES = 6
_CHILD_SECONDS = 120

_COLOUR = re.compile("\x1b\\[[0-9;]*m")
_FRAME = re.compile(r'  File "(.*)", line (\d+), in (.*)\n    (.*)')
_OTHERS = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(str(gymnasium.__file__)).parent))
"""Folders whose frames say nothing about a bug of an environment."""


def _check(function: Callable[..., str]) -> Callable[..., str]:
    """Make whatever goes wrong in a check an AssertionError with a text."""

    @functools.wraps(function)
    def checked(env_id: str, **options: Any) -> str:
        try:
            return function(env_id, **options)
        except AssertionError as error:
            if str(error):
                raise
            raise AssertionError(told(error)) from error
        except UsageError as error:
            raise AssertionError(str(error)) from error
        except Exception as error:  # whatever the environment raises is what the check has found
            raise AssertionError(told(error)) from error

    return checked


@_check
def check_gymnasium(env_id: str) -> str:
    """Gymnasium's own `check_env` has nothing to say: neither an error nor a warning."""
    level, logger.min_level = logger.min_level, logger.WARN
    try:
        # The render mode "human" prints.
        with closing(make(env_id)) as env, warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("always")
            check_env(env.unwrapped)
    except AssertionError as error:
        raise AssertionError(f"Gymnasium's check_env: {error}") from error
    finally:
        logger.min_level = level
    texts = [_COLOUR.sub("", str(warning.message)) for warning in caught]
    said = [text.removeprefix("WARN: ") for text in texts if text.startswith("WARN: ")]
    _require(not said, "\n".join(["Gymnasium's check_env warns:", *said]))
    return ""


@_check
def check_spec(env_id: str) -> str:
    """The spec survives JSON, and makes the same environment again."""
    with closing(make(env_id)) as env:
        spec = env.spec
        if spec is None:
            raise AssertionError("the environment has no spec, so that it can't be made again")
        try:
            text = spec.to_json()
        except (TypeError, ValueError) as error:
            way_out = "register it with art_gym.register, with an entry point 'package.module:Class' and options that are JSON"
            raise AssertionError(f"the spec can't be written as JSON: {error}; {way_out}") from error
        again = EnvSpec.from_json(text)
        _require(again == spec, _differs("the spec that was read from its JSON", spec, again))
        with closing(gymnasium.make(again)) as other:
            _require(env.action_space == other.action_space, _differs("the action space", env.action_space, other.action_space))
            first, second = env.reset(seed=7)[0], other.reset(seed=7)[0]
            _require(first == second, _differs("the first observation of the environment made from its spec's JSON", first, second))
    return ""


@_check
def check_pickling(env_id: str) -> str:
    """An environment that is pickled, at the start of an episode and in the middle, goes on as the original does."""
    for taken in range(_PICKLED):
        with closing(make(env_id)) as env:
            actions = _actions(env.action_space, seed=taken)
            env.reset(seed=taken)
            if any(_over(env.step(next(actions))) for _ in range(taken)):
                continue
            try:
                pickled = pickle.dumps(env)
            except Exception as error:  # pickling runs code of whatever the environment holds
                raise AssertionError(f"the environment can't be pickled after {taken} steps: {told(error)}{_culprits(env)}") from error
            with closing(pickle.loads(pickled)) as twin:
                for number, action in enumerate(itertools.islice(actions, _STEPS)):
                    expected = env.step(copy.deepcopy(action))
                    where = f"pickled after {taken} steps, at step {number} with {_brief(action)}"
                    _require_equal_steps(where, expected, twin.step(copy.deepcopy(action)))
                    if _over(expected):
                        break
    return ""


def _over(step: Sequence[Any]) -> bool:
    return bool(step[2] or step[3])


def _culprits(env: gymnasium.Env[Any, Any]) -> str:
    names = [name for name, value in vars(env.unwrapped).items() if not _pickles(value)]
    return f"\n  what can't be pickled is in: {', '.join(names)}" if names else ""


def _pickles(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # noqa: BLE001  pickling runs code of whatever the value is
        return False
    return True


@_check
def check_vector(env_id: str) -> str:
    """Two of them in a vector environment, in every mode, do what they do alone."""
    modes = list(itertools.product(("sync", "async"), AutoresetMode, ("same", "different"), (True, False)))
    for mode, autoreset, observation_mode, copied in modes:
        options = {"autoreset_mode": autoreset, "observation_mode": observation_mode, "copy": copied}
        try:
            _play_vector(env_id, mode, options)
        except Exception as error:  # whatever the environment raises, there or in another process
            where = f"make_vec, {mode}, autoreset mode {autoreset.name}, observation mode {observation_mode}, copy={copied}"
            problem = str(error) if isinstance(error, AssertionError) and str(error) else told(error)
            raise AssertionError(f"{where}: {problem}") from error
    return f"{len(modes)} modes"


def _play_vector(env_id: str, mode: str, options: dict[str, Any]) -> None:
    autoreset = options["autoreset_mode"]
    with contextlib.ExitStack() as stack:
        with warnings.catch_warnings():
            # Python warns of every fork of a process with threads; those that idle here hold no lock.
            warnings.filterwarnings("ignore", "(?s).*multi-?threaded.*fork", DeprecationWarning)
            envs = stack.enter_context(closing(gymnasium.make_vec(env_id, num_envs=2, vectorization_mode=mode, vector_kwargs=options)))
        alone = [stack.enter_context(closing(make(env_id))) for _ in range(2)]
        observations, infos = envs.reset(seed=5)
        for index, env in enumerate(alone):
            _require_equal_resets(f"the first reset of environment {index}", env.reset(seed=5 + index), observations, infos, index)
        envs.action_space.seed(0)
        over = np.zeros(len(alone), dtype=np.bool_)
        for number in range(_STEPS):
            actions = envs.action_space.sample()
            observations, rewards, terminated, truncated, infos = envs.step(copy.deepcopy(actions))
            _require(tuple(observations) in envs.observation_space, f"step {number}: the observations aren't in the observation space")
            for index, env in enumerate(alone):
                where = f"step {number} of environment {index} with {_brief(actions[index])}"
                flags = (float(rewards[index]), bool(terminated[index]), bool(truncated[index]))
                if over[index] and autoreset is AutoresetMode.NEXT_STEP:  # the step that resets takes no action
                    where = f"step {number} of environment {index}, the reset after its episode's end"
                    _require(flags == (0.0, False, False), _differs(f"{where}: what it returns (reward, flags)", (0.0, False, False), flags))
                    _require_equal_resets(where, env.reset(), observations, infos, index)
                    continue
                observation, reward, ended, cut, info = env.step(actions[index])
                _require((reward, ended, cut) == flags, _differs(f"{where}: what it returns (reward, flags)", (reward, ended, cut), flags))
                if (ended or cut) and autoreset is AutoresetMode.SAME_STEP:
                    _require(
                        infos["final_obs"][index] == observation,
                        _differs(f'{where}: info["final_obs"], the last observation,', observation, infos["final_obs"][index]),
                    )
                    _require_equal_infos(f'{where}: info["final_info"]', info, infos["final_info"], index)
                    _require_equal_resets(f"{where}, the reset after its episode's end", env.reset(), observations, infos, index)
                else:
                    _require(observations[index] == observation, _differs(f"{where}: the observation", observation, observations[index]))
                    _require_equal_infos(f"{where}: info", info, infos, index)
            over = np.logical_or(terminated, truncated)
            if autoreset is AutoresetMode.DISABLED and over.any():
                observations, infos = envs.reset(options={"reset_mask": over.copy()})
                for index in np.flatnonzero(over):
                    where = f"the reset of environment {index} after step {number}"
                    # A vector environment passes on the options that are left beside the mask.
                    _require_equal_resets(where, alone[index].reset(options={}), observations, infos, index)


def _require_equal_resets(where: str, expected: tuple[Any, dict[str, Any]], observations: Any, infos: dict[str, Any], index: int) -> None:
    observation, info = expected
    _require(observations[index] == observation, _differs(f"{where}: the observation", observation, observations[index]))
    _require_equal_infos(f"{where}: info", info, infos, index)


def _require_equal_infos(where: str, info: Mapping[str, Any], infos: Mapping[str, Any], index: int) -> None:
    for key, value in info.items():
        path = f"{where}[{key!r}]"
        _require(key in infos, f"{path}, which is {value!r}, isn't there")
        if isinstance(value, Mapping):
            _require_equal_infos(path, value, infos[key], index)
        elif isinstance(value, str | int | float | list):
            together = infos[key][index]
            # Gymnasium gives all environments the type of the first one.
            _require(together == value, _differs(f"{path}, which must have one type in every step,", value, together))


@_check
def check_wrappers(env_id: str) -> str:
    """Gymnasium's wrappers TimeLimit, RecordEpisodeStatistics and TransformReward do around it what they say."""
    limit = 3
    with closing(make(env_id)) as bare, closing(make(env_id)) as inner:
        timed: gymnasium.Env[Any, Any] = RecordEpisodeStatistics(TimeLimit(inner, limit))
        env: gymnasium.Env[Any, Any] = TransformReward(timed, lambda reward: 2.0 * float(reward) - 1.0)
        _require(env.action_space == bare.action_space, _differs("the wrapped action space", bare.action_space, env.action_space))
        for seed in range(3):
            first, second = bare.reset(seed=seed)[0], env.reset(seed=seed)[0]
            _require(first == second, _differs("the wrapped environment's first observation", first, second))
            total = 0.0
            for number, action in enumerate(itertools.islice(_actions(bare.action_space, seed), limit), start=1):
                where = f"TransformReward(RecordEpisodeStatistics(TimeLimit(…, {limit}))), step {number} with {_brief(action)}"
                observation, reward, terminated, truncated, _ = bare.step(copy.deepcopy(action))
                expected = (observation, 2.0 * float(reward) - 1.0, terminated, truncated or number == limit)
                *actual, info = env.step(copy.deepcopy(action))
                total += float(reward)
                _require_equal_steps(where, (*expected, {}), (*actual, {}))
                if terminated or truncated or number == limit:
                    recorded = (float(info["episode"]["r"]), int(info["episode"]["l"]))
                    _require(recorded == (total, number), _differs(f"{where}: the recorded return and length", (total, number), recorded))
                    break
    return ""


@_check
def check_scenarios(env_id: str) -> str:
    """The splits' scenarios are disjoint, the same each time and in every process, JSON, and can be reset to."""
    with closing(make(env_id)) as env, closing(make(env_id)) as other:
        _require(callable(getattr(env.unwrapped, "scenarios", None)), "the environment has no method scenarios(split)")
        taken = {split: _take(env, split, _SCENARIOS) for split in SPLITS}
        for split in SPLITS:
            first, again = taken[split][:_COMPARED], [_take(env, split, _COMPARED), _take(other, split, _COMPARED)]
            _require(again == [first] * 2, _differs(f"the split {split!r}, taken again,", first, again))
        everything = [scenario for split in SPLITS for scenario in taken[split]]
        _require_disjoint("id", [repr(scenario["id"]) for scenario in everything])
        starts = [f"({scenario['seed']}, {json.dumps(scenario['options'], sort_keys=True)})" for scenario in everything]
        _require_disjoint("seed and options", starts)
        for split in SPLITS:
            for scenario in taken[split][:3]:
                where = f"reset to the scenario {scenario['id']!r}"
                one, second = (made.reset(seed=scenario["seed"], options=copy.deepcopy(scenario["options"]))[0] for made in (env, other))
                _require(one in env.observation_space, f"{where}: the observation isn't in the observation space: {one!r}")
                _require(one == second, _differs(f"{where}: a second environment's observation", one, second))
        notes = [f"{split}: none" for split in SPLITS if not taken[split]]
        return "; ".join([*notes, *_compare_with_another_process(env.spec, taken)])


def _take(env: gymnasium.Env[Any, Any], split: Split, count: int) -> list[dict[str, Any]]:
    """The first scenarios of a split, as JSON data."""
    found = []
    # Their number is no argument of `scenarios`, which may be endless.
    for scenario in itertools.islice(env.unwrapped.scenarios(split), count):  # type: ignore[attr-defined]  # looked for by the caller
        try:
            data = json.loads(json.dumps(scenario.to_dict(), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise AssertionError(f"the scenario {scenario.id!r} of {split!r} has no JSON form: {error}: {scenario!r}") from error
        _require(Scenario.from_dict(data) == scenario, _differs(f"a scenario of {split!r}, read from its JSON,", scenario, data))
        found.append(data)
    return found


def _require_disjoint(what: str, texts: Sequence[str]) -> None:
    twice = next((text for text, count in Counter(texts).items() if count > 1), None)
    _require(twice is None, f"two of the first {_SCENARIOS} scenarios of each split have the same {what}: {twice}")


_IN_ANOTHER_PROCESS = """
import itertools, json, sys
from art_gym.testing._clock import CLOCK
CLOCK.install()
from gymnasium.envs.registration import load_env_creator
entry_point, kwargs, splits, count = json.loads(sys.argv[1])
with CLOCK.shifted():
    env = load_env_creator(entry_point)(**kwargs).unwrapped
    print()
    print(json.dumps({split: [scenario.to_dict() for scenario in itertools.islice(env.scenarios(split), count)] for split in splits}))
"""


def _compare_with_another_process(spec: EnvSpec | None, taken: Mapping[Split, list[dict[str, Any]]]) -> list[str]:
    """Compare with what an interpreter with another hash seed and another clock takes; return why that couldn't be done."""
    if spec is None or not isinstance(spec.entry_point, str):
        return ["not compared with another process: the entry point is no text"]
    argument = json.dumps([spec.entry_point, spec.kwargs, SPLITS, _COMPARED])
    variables = {
        **os.environ,
        "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    program = [sys.executable, "-c", _IN_ANOTHER_PROCESS, argument]
    done = subprocess.run(program, env=variables, capture_output=True, text=True, timeout=_CHILD_SECONDS, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return [f"not compared with another process: {reason}"]
    there = json.loads(done.stdout.splitlines()[-1])
    for split in SPLITS:
        here = taken[split][:_COMPARED]
        differs = _differs(f"in another process, with another hash seed and another clock, the split {split!r}", here, there[split])
        reasons = "scenarios may not follow a set's order, hash(), the clock or unseeded chance"
        _require(there[split] == here, f"{differs}\n  {reasons}")
    return []


@_check
def check_transitions(env_id: str, *, examples: int = 100, seed: int | None = None) -> str:
    """`check_transitions` finds nothing."""
    report = transitions.check_transitions(env_id, examples=examples, seed=seed)
    return "; ".join([f"{report.examples} examples, {report.steps} steps", *(f"skipped {what}" for what in report.skipped)])


@_check
def check_replay(env_id: str) -> str:
    """Episodes that the runner recorded can be replayed from their JSON form without a difference."""
    with closing(make(env_id)) as env:
        split = starting_split(env)
        scenarios = list(itertools.islice(env.unwrapped.scenarios(split), _EPISODES))  # type: ignore[attr-defined]  # AttributeError says it
    episodes = [episode for group in Runner(env_id, _Chance(), concurrency=2).collect(scenarios) for episode in group.episodes]
    for recorded in episodes:
        failure = recorded.failure
        where = f"the episode of scenario {recorded.scenario.id!r}"
        if failure is not None:
            raise AssertionError(f"{where} failed in the runner ({failure.kind}): {failure.message}{_places(failure.traceback)}")
        episode = Episode.from_dict(json.loads(json.dumps(recorded.to_dict())))
        divergence = replay(env_id, episode)
        _require(divergence is None, f"{where} plays otherwise when it is replayed: {divergence}")
    return f"{len(episodes)} episodes, {sum(len(episode.turns) for episode in episodes)} turns"


class _Chance:
    """An agent that plays what `_actions` gives, and gives up after some turns."""

    name = "chance"

    async def act(self, state: TurnState) -> Reply:
        if state.turn >= _STEPS:
            raise ContextOverflow("enough")
        actions = state.memory.setdefault("actions", _actions(state.action_space, int(state.rng.integers(2**31))))
        return Reply(action=next(actions), policy=self.name)

    async def close(self) -> None:
        """Nothing to release."""


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise AssertionError(problem)


def told(error: BaseException) -> str:
    """The error, and where in the environment's own code it came from."""
    text = "".join(traceback.format_exception_only(error)).strip()
    return text + _places("".join(traceback.format_exception(error, chain=False)))


def _places(text: str) -> str:
    """The last frames of a traceback's text, without those of this framework and of Gymnasium."""
    frames = [frame for frame in _FRAME.findall(text) if not frame[0].startswith(_OTHERS)]
    return "".join(f"\n  {file}:{line}, in {name}: {code}" for file, line, name, code in frames[-3:])


def _brief(action: Any) -> str:
    return action_source(action, prefix="")


def _actions(space: Any, seed: int = 0) -> Iterator[Any]:
    """Actions without end: calls drawn from the space, and now and then what models write too, text and a call of no tool."""
    space = copy.deepcopy(space)
    space.seed(seed)
    for number in itertools.count(1):
        yield say("Let me think.") if number % 5 == 0 else call("no_such_tool") if number % 7 == 0 else space.sample()


def _differs(what: str, expected: Any, actual: Any) -> str:
    return f"{what} differs\n  expected {expected!r}\n  but got  {actual!r}"


def _require_equal_steps(where: str, expected: Sequence[Any], actual: Sequence[Any]) -> None:
    for name, one, other in zip(("observation", "reward", "terminated", "truncated", "info"), expected, actual, strict=True):
        _require(one == other, _differs(f"{where}: the {name}", one, other))
