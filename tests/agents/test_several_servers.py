"""The chat agent over several servers: who takes what, who takes over, and when all are gone."""

import asyncio
import errno
import math
import resource
import socket
import time
from contextlib import asynccontextmanager, contextmanager

import pytest

import art_gym_agents._client as client
import art_gym_agents._replicas as replicas
from art_gym import Runner, Scenario
from art_gym.errors import EngineError, PolicyError, UsageError
from art_gym.rollout import ServerLoad
from art_gym_agents import ChatAgent


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(client, "_FIRST_DELAY", 0.01)
    monkeypatch.setattr(replicas, "_FIRST_PROBE", 0.05)


@asynccontextmanager
async def chat(endpoints, **options):
    agent = ChatAgent([endpoint.url for endpoint in endpoints], "served", **options)
    try:
        yield agent
    finally:
        await agent.close()


async def ask(agent, make_state, scenarios, **options):
    return await asyncio.gather(*(agent.act(make_state(scenario=scenario, **options)) for scenario in scenarios))


def counts(endpoints):
    return [len(endpoint.requests) for endpoint in endpoints]


async def eventually(condition, seconds=10.0):
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.02)


# Who takes what


async def test_the_episodes_of_a_scenario_meet_one_server(endpoints, make_state):
    async with chat(endpoints) as agent:
        for scenario in map(str, range(30)):
            before = counts(endpoints)
            for member in range(4):
                await agent.act(make_state(scenario=scenario, member=member))
            assert sorted(after - earlier for after, earlier in zip(counts(endpoints), before, strict=True)) == [0, 0, 4]
    assert all(counts(endpoints))


@pytest.mark.parametrize("scenarios", [[str(n) for n in range(120)], ["hot"] * 120], ids=["many scenarios", "one"])
async def test_no_server_has_more_than_a_quarter_over_the_mean_in_flight(endpoints, make_state, scenarios):
    for endpoint in endpoints:
        endpoint.usual = 0.5
    async with chat(endpoints) as agent:
        await ask(agent, make_state, scenarios, timeout=30.0)
    assert sum(counts(endpoints)) == 120
    assert max(endpoint.most_in_flight for endpoint in endpoints) <= math.ceil(1.25 * 120 / 3)


async def test_an_episode_that_was_moved_stays_where_it_is(endpoints, make_state):
    async with chat(endpoints) as agent:
        await agent.act(make_state(scenario="s"))
        home = next(endpoint for endpoint in endpoints if endpoint.requests)
        home.script = [503]
        state = make_state(scenario="s")
        await agent.act(state)
        moved_to = next(endpoint for endpoint in endpoints if endpoint.requests and endpoint is not home)
        await agent.act(state)
        await agent.act(state)
        assert (len(home.requests), len(moved_to.requests)) == (2, 3)
        # Another episode of the scenario goes where the scenario belongs.
        await agent.act(make_state(scenario="s", member=1))
        assert len(home.requests) == 3


async def test_the_urls_are_told_and_written_twice_count_once(endpoints):
    urls = [endpoint.url for endpoint in endpoints]
    agent = ChatAgent([*urls, urls[0] + "/"], "served")
    assert (agent.base_url, agent.base_urls) == (urls[0], tuple(urls))
    assert repr(agent) == f"ChatAgent({urls!r}, 'served')"


@pytest.mark.parametrize("urls", [[], "", ["127.0.0.1:8000"], ["http://127.0.0.1:8000/v1", "http://"], "http://host:99999/v1", [8000]])
def test_what_is_no_url_is_refused(urls):
    with pytest.raises(UsageError, match="base_url"):
        ChatAgent(urls, "served")


# Who takes over


@pytest.mark.parametrize("trouble", [429, 503, "reset"])
async def test_what_one_server_cannot_take_goes_to_another_at_once(endpoints, make_state, trouble, monkeypatch):
    monkeypatch.setattr(client, "_FIRST_DELAY", 30.0)
    for endpoint in endpoints[:2]:
        endpoint.usual = trouble
    async with chat(endpoints) as agent:
        await ask(agent, make_state, map(str, range(20)))
    assert len(endpoints[2].requests) == 20


async def test_a_runner_finishes_every_episode_though_a_server_is_killed_amid_them(endpoints):
    for endpoint in endpoints:
        endpoint.usual = 0.05
    async with chat(endpoints) as agent:
        runner = Runner("art_gym/GuessNumber-v0", agent, group_size=2, env_kwargs={"max_turns": 4})

        async def kill():
            await eventually(has_requests)
            await endpoints[0].kill()

        async def has_requests():
            return len(endpoints[0].requests) > 5

        killer = asyncio.create_task(kill())
        groups = [group async for group in runner.run([Scenario(str(seed), seed) for seed in range(40)])]
        await killer
    assert [episode.failure for group in groups for episode in group.episodes] == [None] * 80


async def test_a_dead_server_gets_no_requests_until_a_probe_finds_it_well(endpoints, make_state):
    dead = endpoints[0]
    async with chat(endpoints) as agent:
        await dead.kill()
        await ask(agent, make_state, map(str, range(30)))
        dead.health = 503
        await dead.start()

        async def probed():
            await agent.act(make_state(scenario="other"))
            return len(dead.asked) >= 2

        await eventually(probed)
        assert dead.requests == []
        dead.health = 200

        async def back():
            await ask(agent, make_state, map(str, range(30)))
            return bool(dead.requests)

        await eventually(back)
    assert set(dead.asked) == {"/health"}


async def test_a_server_without_a_health_page_is_asked_for_its_models(endpoints, make_state):
    dead = endpoints[0]
    async with chat(endpoints) as agent:
        await dead.kill()
        await ask(agent, make_state, map(str, range(30)))
        dead.health = 404
        await dead.start()

        async def back():
            await ask(agent, make_state, map(str, range(30)))
            return bool(dead.requests)

        await eventually(back)
    assert {"/health", "/v1/models"} <= set(dead.asked)


async def test_a_server_that_answers_503_only_is_taken_out(endpoints, make_state):
    sick = endpoints[0]
    sick.usual, sick.health = 503, 503
    async with chat(endpoints) as agent:
        for scenario in map(str, range(60)):
            await agent.act(make_state(scenario=scenario))
    # About 20 of 60 belong to it.
    assert len(sick.requests) == 3


async def test_a_server_that_hangs_is_taken_out(endpoints, make_state):
    hanging = endpoints[0]
    hanging.usual, hanging.health = 30.0, 503
    failures = 0
    async with chat(endpoints) as agent:
        for scenario in map(str, range(30)):
            try:
                await agent.act(make_state(scenario=scenario, timeout=0.5))
            except PolicyError:
                failures += 1
    # About 10 of 30 belong to it.
    assert failures == len(hanging.requests) == 3


@pytest.mark.parametrize("status", [429, 503])
async def test_a_server_that_asks_for_a_rest_gets_one_while_the_others_go_on(endpoints, make_state, status):
    tired = endpoints[0]
    tired.script = [(status, {}, {"Retry-After": "60"})]
    begin = time.perf_counter()
    async with chat(endpoints) as agent:
        for scenario in map(str, range(30)):
            await agent.act(make_state(scenario=scenario, timeout=30.0))
    assert time.perf_counter() - begin < 20
    assert len(tired.requests) == 1


async def test_after_its_rest_a_server_takes_requests_again(endpoints, make_state):
    tired = endpoints[0]
    tired.script = [(429, {}, {"Retry-After": "0.3"})]
    async with chat(endpoints) as agent:
        await ask(agent, make_state, map(str, range(30)))
        taken = len(tired.requests)
        await asyncio.sleep(0.4)
        for scenario in map(str, range(30)):
            await agent.act(make_state(scenario=scenario))
    assert len(tired.requests) > taken


async def test_when_all_ask_for_a_rest_the_shortest_is_waited_for(endpoints, make_state):
    for endpoint, seconds in zip(endpoints, ("60", "0.4", "60"), strict=True):
        endpoint.script = [(429, {}, {"Retry-After": seconds})]
    begin = time.perf_counter()
    async with chat(endpoints) as agent:
        await agent.act(make_state(timeout=30.0))
    assert 0.4 <= time.perf_counter() - begin < 20
    assert sorted(counts(endpoints)) == [1, 1, 2]


async def test_when_all_ask_for_a_rest_beyond_the_deadline_it_fails_at_once(endpoints, make_state):
    for endpoint in endpoints:
        endpoint.script = [(503, {"error": {"message": "slow down"}}, {"Retry-After": "3600"})]
    begin = time.perf_counter()
    async with chat(endpoints) as agent:
        with pytest.raises(PolicyError, match="answered 503: slow down"):
            await agent.act(make_state(timeout=60.0))
    assert time.perf_counter() - begin < 20
    assert counts(endpoints) == [1, 1, 1]


async def test_a_server_that_does_not_have_the_model_is_left_out(endpoints, make_state, make_error):
    endpoints[0].health = 503
    endpoints[0].usual = make_error(404, "The model `served` does not exist.")
    async with chat(endpoints) as agent:
        for scenario in map(str, range(30)):
            await agent.act(make_state(scenario=scenario))
    assert len(endpoints[0].requests) == 1


async def test_a_model_that_no_server_has_is_the_users_mistake(endpoints, make_state, make_error):
    for endpoint in endpoints:
        endpoint.usual = make_error(404, "The model `served` does not exist.")
    async with chat(endpoints) as agent:
        with pytest.raises(UsageError, match=r"The model `served` does not exist\.; check the URL"):
            await agent.act(make_state())
    assert counts(endpoints) == [1, 1, 1]


async def test_an_error_that_is_the_requests_own_is_raised_at_once(endpoints, make_state, make_error):
    for endpoint in endpoints:
        endpoint.usual = make_error(400, "Can only get item pairs from a mapping.")
    async with chat(endpoints) as agent:
        with pytest.raises(PolicyError, match="answered 400"):
            await agent.act(make_state())
    assert sum(counts(endpoints)) == 1


async def test_lasting_trouble_everywhere_is_a_policy_error_after_bounded_retries(endpoints, make_state, monkeypatch):
    monkeypatch.setattr(client, "_LONGEST_DELAY", 0.01)
    for endpoint in endpoints:
        endpoint.usual = 500
    async with chat(endpoints) as agent:
        with pytest.raises(PolicyError, match="8 retries"):
            await agent.act(make_state())
    assert sum(counts(endpoints)) == 9


# When all are gone


@pytest.mark.parametrize(("patience", "timeout"), [(0.3, 5.0), (60.0, 0.5)])
async def test_when_all_are_dead_it_is_an_engine_error_that_names_them(endpoints, make_state, patience, timeout):
    for endpoint in endpoints:
        await endpoint.kill()
    begin = time.perf_counter()
    async with chat(endpoints, patience=patience) as agent:
        for _ in range(2):
            with pytest.raises(EngineError) as caught:
                await agent.act(make_state(timeout=timeout))
            assert all(endpoint.url in str(caught.value) for endpoint in endpoints)
    assert time.perf_counter() - begin < 10


async def test_servers_that_are_all_away_for_a_moment_are_waited_for(endpoints, make_state):
    for endpoint in endpoints:
        await endpoint.kill()
    async with chat(endpoints) as agent:
        asked = [asyncio.create_task(agent.act(make_state(scenario=str(n), timeout=30.0))) for n in range(20)]
        await asyncio.sleep(0.3)
        await endpoints[1].start()
        await asyncio.gather(*asked)
    assert counts(endpoints) == [0, 20, 0]


async def test_a_probe_under_way_ends_with_the_agent(endpoints, make_state):
    def probes():
        return [task for task in asyncio.all_tasks() if task.get_coro().__qualname__ == "ChatClient._probe"]

    await endpoints[0].kill()
    async with chat(endpoints) as agent:
        await ask(agent, make_state, map(str, range(30)))
        # It accepts, and never answers.
        with socket.create_server(("127.0.0.1", endpoints[0].port)):
            await asyncio.sleep(0.1)
            await agent.act(make_state())
            await asyncio.sleep(0.1)
            assert len(probes()) == 1
            await agent.close()
            assert probes() == []


# Load


PAGE = b"vllm:num_requests_running %d\nvllm:num_requests_waiting 1\nvllm:kv_cache_usage_perc 0.%d\nvllm:num_preemptions_total 2\n"


async def test_the_load_is_that_of_all_servers_that_tell_it(endpoints):
    endpoints[0].metrics, endpoints[2].metrics = PAGE % (3, 25), PAGE % (4, 5)
    async with chat(endpoints) as agent:
        assert await agent.server_load() == ServerLoad(running=7, waiting=2, cache_usage=0.5, preemptions=4)


async def test_a_server_without_metrics_is_not_asked_again_for_a_while(endpoints, monkeypatch):
    monkeypatch.setattr(client, "_METRICS_AGAIN", 1.0)
    async with chat(endpoints) as agent:
        for _ in range(3):
            assert await agent.server_load() is None
        assert [endpoint.asked for endpoint in endpoints] == [["/metrics"]] * 3
        endpoints[0].metrics = PAGE % (3, 25)
        await asyncio.sleep(1.1)
        assert await agent.server_load() == ServerLoad(3, 1, 0.25, 2)


async def test_a_dead_server_has_no_load_and_is_asked_again(endpoints):
    async with chat(endpoints[:1]) as agent:
        await endpoints[0].kill()
        assert await agent.server_load() is None
        endpoints[0].metrics = PAGE % (3, 25)
        await endpoints[0].start()
        assert await agent.server_load() == ServerLoad(3, 1, 0.25, 2)


async def test_the_load_is_told_within_a_second_though_a_server_is_slow(endpoints):
    endpoints[0].metrics, endpoints[1].metrics = 30.0, PAGE % (3, 25)
    begin = time.perf_counter()
    async with chat(endpoints) as agent:
        assert await agent.server_load() == ServerLoad(3, 1, 0.25, 2)
    assert time.perf_counter() - begin < 2


# Connections


async def test_many_requests_share_as_many_connections_as_are_in_flight(endpoint, make_state):
    async def play(agent):
        for _ in range(20):
            await agent.act(make_state(timeout=30.0))

    async with chat([endpoint]) as agent:
        await asyncio.gather(*(play(agent) for _ in range(30)))
    assert len(endpoint.requests) == 600
    assert len(endpoint.connections) <= 30


@contextmanager
def open_files(soft):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_the_limit_on_open_files_is_raised_when_connections_are_first_needed(endpoint, make_state):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    enough = 65_536 if hard == resource.RLIM_INFINITY else min(65_536, hard)
    with open_files(enough // 2):
        async with chat([endpoint]) as agent:
            await agent.act(make_state())
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (enough, hard)


async def test_too_few_files_for_the_connections_is_the_users_to_mend(make_state):
    # The connections wait in the kernel's queue, so that only this side of them counts.
    with socket.create_server(("127.0.0.1", 0), backlog=200) as server:
        agent = ChatAgent(f"http://127.0.0.1:{server.getsockname()[1]}/v1", "served")
        await agent.server_load()
        free = socket.socket()
        number = free.fileno()
        free.close()
        with open_files(number + 10):
            results = await asyncio.gather(*(agent.act(make_state(timeout=3.0)) for _ in range(30)), return_exceptions=True)
        await agent.close()
    errors = [error for error in results if isinstance(error, UsageError)]
    assert errors
    assert "ulimit -n" in str(errors[0])
    assert "lower the concurrency" in str(errors[0])
    assert errors[0].__cause__.errno == errno.EMFILE
