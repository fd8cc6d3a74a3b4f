"""The runner: groups in order, failures apart, deadlines, and nothing left behind."""

import asyncio
import itertools
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, aclosing

import gymnasium
import pytest

from art_gym.errors import ContextOverflow, EngineError, PolicyError, ToolTimeout, UsageError
from art_gym.messages import call, say
from art_gym.rollout import Reply, Runner
from art_gym.scenarios import Scenario
from art_gym.spaces import ChatSpace, ToolCallSpace
from art_gym.store import EpisodeStore


class Steps(gymnasium.Env):
    """Ends after `options["turns"]` steps, each worth 0.5; `options["step"]` may name something odd that its step does in turn `options["at"]`.

    A plain Gymnasium environment: the runner needs no more than the API and the spaces.
    """

    observation_space = ChatSpace()
    action_space = ToolCallSpace({"go": {"type": "object", "properties": {}}})
    open_instances = 0
    lock = threading.Lock()

    def __init__(self):
        self.closed = False
        with Steps.lock:
            Steps.open_instances += 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.options = options or {}
        self.turn = 0
        if self.options.get("reset") == "raise":
            raise KeyError("no such mailbox")
        return ({"role": "user", "content": f"start {seed}"},), {}

    def step(self, action):
        self.turn += 1
        reward = 0.5
        if self.turn == self.options.get("at", 1):
            match self.options.get("step"):
                case "raise":
                    raise ZeroDivisionError("a bug")
                case "exit":
                    raise SystemExit(3)
                case "tool timeout":
                    raise ToolTimeout("search ran longer than 1 s")
                case "own timeout":
                    raise TimeoutError("the database")
                case "nan":
                    reward = float("nan")
                case "unwritable":
                    return ({"role": "user", "content": object()},), 0.0, True, False, {}
                case float(seconds):
                    time.sleep(seconds)
        done = self.turn >= self.options.get("turns", 2)
        info = {"rewards": {"step": reward}, "metrics": {"turns": self.turn}, "invalid_calls": 1, "turn": self.turn}
        return ({"role": "tool", "tool_call_id": "call_0", "content": f"step {self.turn}"},), reward, done, False, info

    def close(self):
        if not self.closed:
            self.closed = True
            with Steps.lock:
                Steps.open_instances -= 1


class InstantSteps(Steps):
    instant = True


class Agent:
    """Plays `go`, or what `odd` says for a scenario and turn."""

    name = "test agent"

    def __init__(self, odd=None, delay=0.0):
        self.odd = odd or (lambda state: None)
        self.delay = delay
        self.asked = []
        self.playing = self.most_playing = 0

    async def act(self, state):
        self.asked.append((state.scenario.id, state.member, state.turn))
        self.playing += 1
        self.most_playing = max(self.playing, self.most_playing)
        try:
            await asyncio.sleep(self.delay)
            odd = self.odd(state)
            if isinstance(odd, BaseException):
                raise odd
            if isinstance(odd, float):
                await asyncio.sleep(odd)
            return odd if isinstance(odd, Reply) else Reply(call("go"), policy="v1", prompt_ids=[1], completion_ids=[2], logprobs=[-0.1])
        finally:
            self.playing -= 1

    async def close(self):
        pass


def scenarios(count=None, **options):
    numbers = itertools.count() if count is None else range(count)
    return (Scenario(f"s{number}", seed=number, options=options) for number in numbers)


def mixed(count, odd, **options):
    """Scenarios of which those in `odd` have the options."""
    return [Scenario(f"s{number}", seed=number, options=options if number in odd else {}) for number in range(count)]


async def play(runner, starts, **kwargs):
    return [group async for group in runner.run(starts, **kwargs)]


@pytest.fixture(autouse=True)
def nothing_left_behind():
    Steps.open_instances = 0
    yield
    give_up = time.monotonic() + 4
    while time.monotonic() < give_up and (names() or Steps.open_instances):
        time.sleep(0.01)
    assert names() == []
    assert Steps.open_instances == 0


@pytest.fixture
def open_store(tmp_path):
    """Opens the same store anew each time, as another process would; closes them all at the end."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(EpisodeStore(tmp_path))


def names():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("art_gym ")]


@pytest.mark.parametrize("env", [Steps, InstantSteps])
async def test_an_episode_holds_what_happened(env):
    (group,) = await play(Runner(env, Agent()), scenarios(1))
    (episode,) = group.episodes
    assert episode.env_id == env.__name__
    assert [tool["function"]["name"] for tool in episode.tools] == ["go"]
    assert [message["content"] for message in episode.messages] == ["start 0", None, "step 1", None, "step 2"]
    first, last = episode.turns
    assert (first.prompt_ids, first.completion_ids, first.logprobs, first.policy) == ([1], [2], [-0.1], "v1")
    assert (first.reward, first.rewards, first.invalid_calls) == (0.5, {"step": 0.5}, 1)
    assert [message["content"] for message in last.observation] == ["step 1"]
    assert (episode.reward, episode.metrics, episode.terminated, episode.truncated, episode.failure) == (1.0, {"turns": 2.0}, True, False, None)
    assert 0 < episode.seconds < 5


async def test_groups_come_in_the_order_of_the_scenarios_however_long_they_take():
    agent = Agent(odd=lambda state: 0.02 * (state.scenario.seed % 3))
    groups = await play(Runner(Steps, agent, group_size=2, concurrency=4), scenarios(9))
    assert [group.scenario.id for group in groups] == [f"s{number}" for number in range(9)]
    assert [[episode.member for episode in group.episodes] for group in groups] == [[0, 1]] * 9
    assert {episode.scenario.id for group in groups[:1] for episode in group.episodes} == {"s0"}


async def test_no_more_than_concurrency_episodes_are_in_play():
    agent = Agent(delay=0.005)
    await play(Runner(InstantSteps, agent, concurrency=3, group_size=2), scenarios(5))
    assert agent.most_playing == 3


async def test_endless_scenarios_are_taken_as_needed():
    taken = 0

    def endless():
        nonlocal taken
        for scenario in scenarios():
            taken += 1
            yield scenario

    runner = Runner(InstantSteps, Agent(), concurrency=4)
    async with aclosing(runner.run(endless())) as groups:
        ids = [(await anext(groups)).scenario.id for _ in range(5)]
        await asyncio.sleep(0.2)  # plenty for instant episodes to run ahead as far as they may
    assert ids == ["s0", "s1", "s2", "s3", "s4"]
    assert 5 <= taken <= 5 + 2 * 4 + 2


async def test_the_generator_of_an_episode_depends_on_scenario_and_member_only():
    draws = {}

    def draw(state):
        draws.setdefault((state.scenario.id, state.member), []).append(int(state.rng.integers(1000)))

    await play(Runner(InstantSteps, Agent(odd=draw), group_size=2, concurrency=8), scenarios(2))
    again, draws = draws, {}
    await play(Runner(InstantSteps, Agent(odd=draw), group_size=2, concurrency=1), scenarios(2))
    assert draws == again
    assert len(set(map(tuple, draws.values()))) == 4


async def test_the_generator_of_an_episode_is_not_the_environments():
    class Hiding(InstantSteps):
        def reset(self, *, seed=None, options=None):
            result = super().reset(seed=seed, options=options)
            self.options = {"turns": 1}
            secrets.append(float(self.np_random.random()))
            return result

    secrets, draws = [], []
    await play(Runner(Hiding, Agent(odd=lambda state: draws.append(float(state.rng.random()))), group_size=3), scenarios(20))
    assert len(draws) == len(secrets) == 60
    assert not set(draws) & set(secrets)


async def test_memory_lasts_for_the_episode_and_messages_grow():
    seen = {}

    def look(state):
        state.memory["turns"] = state.memory.get("turns", 0) + 1
        seen[state.scenario.id, state.turn] = (state.memory["turns"], [message["role"] for message in state.messages], len(state.observation))

    await play(Runner(InstantSteps, Agent(odd=look), concurrency=1), scenarios(2))
    assert seen["s1", 0] == (1, ["user"], 1)
    assert seen["s1", 1] == (2, ["user", "assistant", "tool"], 1)


# Failures


@pytest.mark.parametrize("env", [Steps, InstantSteps])
@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"step": "raise"}, "environment", "ZeroDivisionError: a bug"),
        ({"step": "exit"}, "environment", "SystemExit(3)"),
        ({"reset": "raise"}, "environment", "no such mailbox"),
        ({"step": "own timeout"}, "environment", "the database"),
        ({"step": "nan"}, "environment", "reward is nan; it must be a finite number"),
        ({"step": "tool timeout"}, "tool_timeout", "longer than 1 s"),
    ],
)
async def test_one_failing_episode_of_eight_leaves_seven_results(env, options, kind, words):
    groups = await play(Runner(env, Agent(), concurrency=3), mixed(8, {3}, **options))
    failures = {group.scenario.id: group.episodes[0].failure for group in groups if group.failed}
    assert list(failures) == ["s3"]
    assert failures["s3"].kind == kind
    assert words in failures["s3"].message
    assert "Traceback" in failures["s3"].traceback
    assert [group.finished[0].reward for group in groups if group.finished] == [1.0] * 7


async def test_a_failed_episode_keeps_the_turns_before():
    ((group,),) = [await play(Runner(Steps, Agent()), scenarios(1, step="raise", at=3, turns=5))]
    assert [turn.reward for turn in group.episodes[0].turns] == [0.5, 0.5]


async def test_an_environment_that_cannot_be_made_fails_each_episode():
    def make():
        raise OSError("no browser")

    groups = await play(Runner(make, Agent()), scenarios(3))
    assert [group.episodes[0].failure.message for group in groups] == ["OSError: no browser"] * 3


async def test_a_policy_error_fails_its_episode_only():
    agent = Agent(odd=lambda state: PolicyError("500 after 8 retries") if state.scenario.id == "s1" else None)
    groups = await play(Runner(Steps, agent), scenarios(3))
    assert [group.episodes[0].failure and group.episodes[0].failure.kind for group in groups] == [None, "policy", None]


async def test_a_bug_in_the_agent_fails_its_episode_with_the_traceback():
    agent = Agent(odd=lambda state: IndexError("oops") if state.scenario.id == "s1" else None)
    groups = await play(Runner(Steps, agent), scenarios(3))
    failure = groups[1].episodes[0].failure
    assert (failure.kind, failure.message) == ("policy", "IndexError: oops")
    assert "in act" in failure.traceback
    assert [group.finished[0].reward for group in (groups[0], groups[2])] == [1.0, 1.0]


@pytest.mark.parametrize(("at", "reward", "last"), [(0, 0.0, "start 0"), (1, 0.5, "step 1")])
async def test_context_overflow_truncates_with_the_reward_so_far(at, reward, last):
    agent = Agent(odd=lambda state: ContextOverflow("too long") if state.turn == at else None)
    ((group,),) = [await play(Runner(Steps, agent), scenarios(1))]
    (episode,) = group.finished
    assert (episode.truncated, episode.truncation, episode.terminated, episode.reward) == (True, "context_length", False, reward)
    assert (len(episode.turns), episode.messages[-1]["content"]) == (at, last)


async def test_no_policy_call_after_the_end():
    agent = Agent()
    await play(Runner(Steps, agent), scenarios(1, turns=1))
    assert agent.asked == [("s0", 0, 0)]


async def test_truncation_by_the_environment_and_by_its_turns():
    class Limited(InstantSteps):
        def step(self, action):
            observation, reward, done, _, info = super().step(action)
            return observation, reward, False, done, info | self.options["info"]

    groups = await play(Runner(Limited, Agent()), [*scenarios(1, info={}), *scenarios(1, info={"truncation": "max_turns"})])
    assert [(group.episodes[0].truncated, group.episodes[0].truncation) for group in groups] == [(True, "environment"), (True, "max_turns")]


async def test_an_environment_that_says_terminated_and_truncated_terminated():
    class Both(InstantSteps):
        def step(self, action):
            observation, reward, done, _, info = super().step(action)
            return observation, reward, done, done, info

    ((group,),) = [await play(Runner(Both, Agent()), scenarios(1))]
    assert (group.episodes[0].terminated, group.episodes[0].truncated, group.episodes[0].truncation) == (True, False, None)


# Deadlines


async def test_blocking_tools_of_20_episodes_run_side_by_side():
    begin = time.perf_counter()
    groups = await play(Runner(Steps, Agent(), concurrency=20), scenarios(20, step=0.2, turns=1))
    assert time.perf_counter() - begin < 2
    assert len(groups) == 20


async def test_a_stuck_tool_is_left_at_its_deadline_and_its_instance_replaced():
    begin = time.perf_counter()
    groups = await play(Runner(Steps, Agent(), concurrency=1, tool_timeout=0.3), mixed(3, {0}, step=1.5))
    assert time.perf_counter() - begin < 1.4
    assert groups[0].episodes[0].failure.kind == "tool_timeout"
    assert groups[0].episodes[0].failure.message == "TimeoutError: the environment's step did not return within 0.3 s"
    assert [group.finished[0].reward for group in groups[1:]] == [1.0, 1.0]


async def test_a_policy_that_does_not_answer_fails_at_its_deadline():
    agent = Agent(odd=lambda state: 30.0 if state.scenario.id == "s1" else None)
    begin = time.perf_counter()
    groups = await play(Runner(Steps, agent, turn_timeout=0.2), scenarios(3))
    assert time.perf_counter() - begin < 5
    failure = groups[1].episodes[0].failure
    assert (failure.kind, failure.message) == ("policy", "the agent 'test agent' gave no reply within 0.2 s")


async def test_the_agent_is_told_how_long_it_may_take():
    told = []
    await play(Runner(InstantSteps, Agent(odd=lambda state: told.append(state.timeout)), turn_timeout=5, episode_timeout=2), scenarios(1))
    assert all(1.5 < timeout <= 2 for timeout in told)


async def test_an_endless_episode_is_bounded_by_time():
    agent = Agent(delay=0.01)
    begin = time.perf_counter()
    groups = await play(Runner(InstantSteps, agent, episode_timeout=0.3), scenarios(1, turns=10**9))
    assert time.perf_counter() - begin < 5
    assert groups[0].episodes[0].failure.kind == "policy"
    assert len(groups[0].episodes[0].turns) > 3


async def test_an_episode_out_of_time_in_a_step_fails_with_that_kind():
    groups = await play(Runner(Steps, Agent(), episode_timeout=0.2), scenarios(1, step=1.0))
    assert groups[0].episodes[0].failure.kind == "tool_timeout"


STUCK = """
import sys, time
sys.path[:0] = {path!r}
from art_gym import Runner, Scenario, ToolEnv, call, tool
from art_gym.rollout import Reply
class Stuck(ToolEnv):
    @tool
    def wait(self) -> str:
        "Wait for ever."
        time.sleep(3600)
class Waits:
    name = "waits"
    async def act(self, state):
        return Reply(call("wait"))
    async def close(self):
        pass
(group,) = Runner(Stuck, Waits(), tool_timeout=0.2).collect([Scenario("s", 0)])
print(group.episodes[0].failure.kind)
"""


def test_a_tool_that_never_returns_does_not_keep_the_process_alive():
    done = subprocess.run([sys.executable, "-c", STUCK.format(path=sys.path)], capture_output=True, text=True, timeout=30, check=False)
    assert (done.stdout, done.returncode) == ("tool_timeout\n", 0), done.stderr


# The engine


async def test_a_dead_engine_stops_the_rollout_and_what_was_in_play_is_recorded(open_store):
    class Dying(Agent):
        async def act(self, state):
            if state.scenario.id == "s5":
                while ("s6", 0, 0) not in self.asked:
                    await asyncio.sleep(0.01)
                raise EngineError("gone")
            return await super().act(state)

    agent = Dying(odd=lambda state: 10.0 if state.scenario.id == "s6" else None)
    journal = open_store().journal("a")
    yielded = []

    async def consume():
        async for group in Runner(Steps, agent, concurrency=2).run(scenarios(), journal=journal):
            yielded.append(group.scenario.id)

    with pytest.raises(EngineError, match="gone"):
        await consume()
    assert yielded == ["s0", "s1", "s2", "s3", "s4"]
    recorded = {episode.scenario.id: episode.failure and episode.failure.kind for episode in journal.read()}
    assert recorded == dict.fromkeys(["s0", "s1", "s2", "s3", "s4"]) | {"s5": "engine", "s6": "engine"}
    assert len(agent.asked) < 20


async def test_a_policy_error_of_a_dead_engine_is_the_engines_with_its_log():
    def check():
        raise EngineError("vLLM died; its log ends with: out of memory")

    agent = Agent(odd=lambda state: PolicyError("connection reset"))
    with pytest.raises(EngineError, match="out of memory"):
        await play(Runner(Steps, agent, engine_check=check), scenarios())


async def test_a_dead_engine_is_noticed_while_every_episode_waits(monkeypatch):
    monkeypatch.setattr("art_gym.rollout.runner.ENGINE_CHECK_SECONDS", 0.05)
    checks = []

    def check():
        checks.append(threading.current_thread())
        if len(checks) > 2:
            raise EngineError("vLLM died")

    begin = time.perf_counter()
    with pytest.raises(EngineError, match="vLLM died"):
        await play(Runner(Steps, Agent(odd=lambda state: 30.0), engine_check=check), scenarios())
    assert time.perf_counter() - begin < 5
    assert threading.main_thread() not in checks


# Recording


async def test_episodes_are_on_disk_before_their_group_is_yielded(open_store):
    store = open_store()
    async for group in Runner(Steps, Agent(), group_size=3, concurrency=2).run(scenarios(4), journal=store.journal("train-0001")):
        on_disk = open_store().journal("train-0001").latest()
        assert [on_disk[episode.id] for episode in group.episodes] == group.episodes
    assert store.journal("train-0001").latest().keys() == {f"train-0001/{index}/{member}" for index in range(4) for member in range(3)}


async def test_an_episode_is_on_disk_as_soon_as_it_ends(open_store):
    journal = open_store().journal("a")
    agent = Agent(odd=lambda state: 30.0 if state.scenario.id == "s0" else None)
    async with aclosing(Runner(Steps, agent, concurrency=2).run(scenarios(), journal=journal)) as groups:
        waiting = asyncio.ensure_future(anext(groups))
        await asyncio.sleep(0.3)
        assert "a/1/0" in journal.latest()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_what_json_cannot_hold_is_a_recorded_failure(open_store):
    journal = open_store().journal("a")
    groups = await play(Runner(Steps, Agent()), mixed(3, {1}, step="unwritable"), journal=journal)
    assert [bool(group.failed) for group in groups] == [False, True, False]
    assert groups[1].episodes[0].failure.kind == "environment"
    assert [episode.failure is None for _, episode in sorted(journal.latest().items())] == [True, False, True]


async def test_a_rollout_is_never_mixed_into_another(open_store):
    journal = open_store().journal("a")
    await play(Runner(Steps, Agent()), scenarios(1), journal=journal)
    with pytest.raises(UsageError, match="already holds episodes"):
        await play(Runner(Steps, Agent()), scenarios(1), journal=journal)
    with pytest.raises(UsageError, match="resume with the same scenarios"):
        await play(Runner(Steps, Agent()), [Scenario("other", seed=9)], journal=journal, resume=True)


async def test_resuming_plays_only_the_missing_and_the_failed(open_store):
    journal = open_store().journal("a")
    first = Agent(odd=lambda state: PolicyError("500") if state.scenario.id == "s1" else None)
    await play(Runner(Steps, first, group_size=2), scenarios(3), journal=journal)
    second = Agent()
    groups = await play(Runner(Steps, second, group_size=2), scenarios(4), journal=journal, resume=True)
    assert {(scenario, member) for scenario, member, _ in second.asked} == {("s1", 0), ("s1", 1), ("s3", 0), ("s3", 1)}
    assert [len(group.finished) for group in groups] == [2, 2, 2, 2]
    assert all(episode.failure is None for episode in journal.latest().values())


async def test_a_journal_that_cannot_be_written_stops_the_rollout(tmp_path, open_store):
    (tmp_path / "episodes").write_text("a file where the folder should be")
    with pytest.raises(OSError, match="episodes"):
        await play(Runner(Steps, Agent()), scenarios(), journal=open_store().journal("a"))


# Stopping


async def test_leaving_early_cancels_what_is_in_play(open_store):
    agent = Agent(odd=lambda state: 30.0 if state.scenario.seed > 0 else None)
    journal = open_store().journal("a")
    before = asyncio.all_tasks()
    async with aclosing(Runner(Steps, agent, concurrency=4).run(scenarios(), journal=journal)) as groups:
        async for _ in groups:
            break
    assert asyncio.all_tasks() == before
    assert agent.playing == 0
    kinds = [episode.failure and episode.failure.kind for _, episode in sorted(journal.latest().items())]
    assert kinds[0] is None
    assert set(kinds[1:]) == {"cancelled"}


async def test_a_break_without_aclosing_cleans_up_too():
    before = asyncio.all_tasks()
    async for _ in Runner(Steps, Agent(odd=lambda state: 0.2), concurrency=4).run(scenarios()):
        break
    await asyncio.sleep(0.3)
    assert asyncio.all_tasks() == before


async def test_cancelling_the_caller_propagates():
    agent = Agent(delay=30.0)
    task = asyncio.create_task(play(Runner(Steps, agent), scenarios()))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert agent.playing == 0


async def test_cancelling_does_not_wait_for_a_stuck_tool_for_ever(monkeypatch):
    monkeypatch.setattr("art_gym.rollout._hosts.CLOSE_SECONDS", 0.2)
    task = asyncio.create_task(play(Runner(Steps, Agent()), scenarios(1, step=2.0)))
    await asyncio.sleep(0.2)
    begin = time.perf_counter()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.perf_counter() - begin < 1.5


async def test_an_error_in_the_scenarios_reaches_the_caller():
    def broken():
        yield Scenario("s0", 0)
        raise LookupError("no more files")

    with pytest.raises(LookupError, match="no more files"):
        await play(Runner(Steps, Agent()), broken())


async def test_an_error_in_the_progress_display_reaches_the_caller():
    class Broken:
        def on_episode(self, episode):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        await play(Runner(Steps, Agent()), scenarios(), progress=Broken())


async def test_a_mistake_in_the_agents_setup_stops_the_rollout():
    with pytest.raises(UsageError, match="no such model"):
        await play(Runner(Steps, Agent(odd=lambda state: UsageError("no such model"))), scenarios())


# The convenience


def test_collect_works_without_a_loop_and_closes_the_agent():
    closed = []
    agent = Agent()

    async def close():
        closed.append(True)

    agent.close = close
    groups = Runner(Steps, agent, group_size=2).collect(scenarios(3))
    assert [len(group.episodes) for group in groups] == [2, 2, 2]
    assert closed == [True]


async def test_collect_works_where_a_loop_is_running():
    assert len(Runner(Steps, Agent()).collect(scenarios(3))) == 3
    with pytest.raises(LookupError):
        Runner(Steps, Agent(odd=lambda state: None)).collect(iter_raising())


def iter_raising():
    raise LookupError
    yield


def test_progress_hears_of_every_episode():
    heard = []

    class Listener:
        def on_episode(self, episode):
            heard.append(episode.id)

    Runner(Steps, Agent(), group_size=2).collect(scenarios(2), progress=Listener())
    assert sorted(heard) == ["0/0", "0/1", "1/0", "1/1"]


@pytest.mark.parametrize(
    ("options", "words"),
    [({"concurrency": 0}, "concurrency is 0"), ({"group_size": 0}, "group_size is 0"), ({"turn_timeout": 0}, "turn_timeout is 0")],
)
def test_settings_out_of_range_are_refused(options, words):
    with pytest.raises(UsageError, match=words):
        Runner(Steps, Agent(), **options)


def test_a_function_takes_no_environment_arguments():
    with pytest.raises(UsageError, match="env_kwargs go with"):
        Runner(Steps, Agent(), env_kwargs={"size": 3})


async def test_text_actions_reach_the_environment():
    ((group,),) = [await play(Runner(Steps, Agent(odd=lambda state: Reply(say("hm"), finish_reason="length"))), scenarios(1))]
    assert [(turn.action, turn.finish_reason) for turn in group.episodes[0].turns] == [({"role": "assistant", "content": "hm"}, "length")] * 2
