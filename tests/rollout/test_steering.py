"""Steering: the limit that is found out, by models of servers and without any time passing."""

import asyncio
import logging
import math

import pytest

from art_gym.rollout import ServerLoad, _steering
from art_gym.rollout._steering import FIRST, Seen, Servers, Steering


async def unasked():
    raise AssertionError


def told(load, answered=0):
    servers = Servers(unasked)
    servers.take(load, answered)
    return servers


def seen(in_flight=128, answered=0, needed=True, peak=None, **loop):
    return Seen(in_flight, in_flight if peak is None else peak, answered, needed, **loop)


def limit_by(servers, *looks):
    """The limit after the looks at gate and loop, each with the servers' loads fresh."""
    steering = Steering()
    for one in looks:
        for each in servers:
            each.fresh = each.load is not None
        steering.go_on(servers, one)
    return steering.limit


class Line:
    """A server that answers a fifth of what it runs in a second: as many as it has `places`, or as its `memory` holds.

    Where memory is what lacks, those that wait push others out, which are computed again: up to half of its work. A fluid of requests: the
    gates' parts of it are computed in proportion to what they sent.
    """

    def __init__(self, places, memory=math.inf):
        self.places, self.memory = places, memory
        self.preemptions = 0.0

    def second(self, sent):
        """What each gate's requests are answered, and the load before it."""
        there = sum(sent)
        running = min(there, self.places, self.memory)
        waiting = there - running
        again = running / 10 * waiting / there if self.memory < self.places else 0.0
        self.preemptions += again
        share = (running / 5 - again) / there
        usage = min(1.0, there / self.memory) if self.memory < math.inf else 0.2
        return [part * share for part in sent], ServerLoad(round(running), round(waiting), usage, int(self.preemptions))


def settle(line, gates, seconds, begin=None):
    """The gates' mean requests in flight, and how many are answered in a second, over the last quarter of the time."""
    steerings = [Steering() for _ in range(gates)]
    for steering, first in zip(steerings, begin or [FIRST] * gates, strict=True):
        steering.limit = float(first)
    servers = [Servers(unasked) for _ in range(gates)]
    flying, counts, rates, means = [0.0] * gates, [0.0] * gates, [], [0.0] * gates
    for second in range(seconds):
        flying = [max(now, float(int(steering.limit))) for now, steering in zip(flying, steerings, strict=True)]
        answers, load = line.second(flying)
        counts = [count + answer for count, answer in zip(counts, answers, strict=True)]
        flying = [now - answer for now, answer in zip(flying, answers, strict=True)]
        for number, steering in enumerate(steerings):
            servers[number].take(load, int(counts[number]))
            in_flight = max(round(flying[number]), int(steering.limit))
            steering.go_on([servers[number]], seen(in_flight, int(counts[number])))
        if second >= seconds * 3 // 4:
            rates.append(sum(answers))
            means = [mean + now / (seconds // 4) for mean, now in zip(means, flying, strict=True)]
    return means, sum(rates) / len(rates)


@pytest.mark.parametrize("places", [16, 64, 256, 1024])
@pytest.mark.parametrize("gates", [1, 3, 8])
def test_a_server_is_kept_full_without_queueing_much_and_shared_equally(places, gates):
    means, rate = settle(Line(places), gates, 400)
    assert rate >= 0.95 * places / 5
    # A sixteenth of what runs, and at least 2, wait for each gate; what is answered in a second is on its way.
    assert sum(means) <= places + gates * max(2, places / 16) * 1.5
    assert max(means) <= 1.5 * min(means)


@pytest.mark.parametrize("places", [64, 256, 1024])
def test_gates_that_begin_unequal_come_to_equal_shares(places):
    means, _ = settle(Line(places), 3, 600, [places * 2, places // 2, 4])
    assert max(means) <= 1.3 * min(means)


@pytest.mark.parametrize("memory", [16, 64, 256, 1024])
@pytest.mark.parametrize("gates", [1, 3])
def test_a_server_that_computes_again_for_want_of_memory_isnt_thrashed(memory, gates):
    means, rate = settle(Line(10 * memory, memory), gates, 800)
    # To 16 requests and three gates, one more or less for each is a fifth.
    assert rate >= (0.95 if memory > 16 else 0.9) * memory / 5
    assert max(means) <= 1.5 * min(means)


def test_many_more_are_tried_while_a_server_has_plenty_of_room():
    assert limit_by([told(ServerLoad(100, 0, 0.2))], seen()) == 1.5 * FIRST


def test_a_few_more_are_tried_while_its_cache_is_half_full():
    # A sixteenth of the 96 that run in a round; half a round has passed.
    assert limit_by([told(ServerLoad(96, 0, 0.6))], seen(answered=64)) == FIRST + 96 / 16 / 2


def test_what_waits_at_a_server_takes_off_the_gates_own_share():
    # Half of all wait, so half of this gate's 128 are too many, but for the 8 that are a sixteenth of what runs; half a round has passed.
    assert limit_by([told(ServerLoad(128, 128))], seen(answered=64)) == FIRST - (64 - 8) / 2


def test_preemptions_take_off_even_where_nothing_waits():
    servers = told(ServerLoad(128, 0, 0.8, preemptions=1000))
    assert servers.price == 0.0
    # 64 put back while 64 were answered: half of what was computed was in vain.
    servers.take(ServerLoad(128, 0, 0.8, preemptions=1064), 64)
    assert servers.price == 0.5
    assert limit_by([servers], seen(answered=64)) == FIRST - (64 - 8) / 2


def test_preemptions_count_from_0_again_when_a_server_was_replaced():
    servers = told(ServerLoad(64, 0, 0.5, preemptions=1000))
    servers.take(ServerLoad(64, 0, 0.5, preemptions=3), 64)
    assert servers.price == 0.0


def test_a_full_cache_takes_off():
    # A twentieth of each, against the 4 that are a sixteenth of the 64 that run; here, 128 requests of which as many were answered.
    assert told(ServerLoad(100, 0, 1.0)).price == pytest.approx(0.05)
    assert limit_by([told(ServerLoad(64, 0, 1.0))], seen(answered=128)) == pytest.approx(FIRST + 4 - 0.05 * 64)


def test_nothing_is_tried_again_before_the_servers_were_seen_anew():
    servers, steering = told(ServerLoad(100, 0)), Steering()
    for _ in range(5):
        steering.go_on([servers], seen())
    assert steering.limit == 1.5 * FIRST


@pytest.mark.parametrize("load", [ServerLoad(0, 500), ServerLoad(0, 0)], ids=["paused", "idle"])
def test_a_server_that_runs_nothing_changes_nothing(load):
    assert limit_by([told(load)], seen(answered=64)) == FIRST


def test_nothing_more_is_tried_while_nothing_is_needed():
    assert limit_by([told(ServerLoad(10, 0))], seen(in_flight=10, needed=False)) == FIRST
    assert limit_by([], seen(in_flight=10, needed=False)) == FIRST


def test_too_many_in_flight_are_lowered_even_where_no_more_are_needed():
    assert limit_by([told(ServerLoad(16, 48))], seen(in_flight=64, answered=64, needed=False)) == 64 + 2 - 48


def test_more_are_tried_where_the_agent_knows_nothing_of_servers():
    assert limit_by([told(None)], seen(), seen()) == 1.5 * 1.5 * FIRST
    assert limit_by([], seen()) == 1.5 * FIRST


def test_one_agents_servers_that_are_full_lower_the_limit_beside_others_that_are_idle_or_unknown():
    unknown = told(ServerLoad(1, 0))
    unknown.take(None, 0)
    for others in ([told(ServerLoad(0, 0))], [told(ServerLoad(50, 0))], [unknown], [told(None)]):
        assert limit_by([*others, told(ServerLoad(64, 64))], seen(answered=128)) == FIRST - 64 + 4


def test_no_more_are_tried_while_one_of_several_agents_servers_isnt_known():
    unknown = told(ServerLoad(1, 0))
    unknown.take(None, 0)
    assert limit_by([unknown, told(ServerLoad(64, 0))], seen(answered=128)) == FIRST
    assert limit_by([told(ServerLoad(0, 0)), told(ServerLoad(64, 0))], seen(answered=128)) == 1.5 * FIRST


def test_an_event_loop_that_is_late_by_its_own_work_gets_fewer_but_never_less_than_64():
    late = seen(late=0.03, busy=0.9)
    assert limit_by([], late) == 0.8 * 128
    assert limit_by([], late, seen(in_flight=70, late=0.03, busy=0.9)) == 64
    assert limit_by([told(ServerLoad(16, 112))], seen(answered=128), seen(in_flight=20, answered=128, late=0.03, busy=0.9)) < 64


@pytest.mark.parametrize("loop", [{"late": 0.03, "busy": 0.5}, {"late": 0.01, "busy": 1.0}], ids=["for want of a processor", "not late"])
def test_an_event_loop_that_isnt_late_by_its_own_work_keeps_its_limit(loop):
    assert limit_by([], seen(needed=False, **loop)) == FIRST


def test_beyond_what_made_the_loop_late_only_a_few_more_are_tried_at_a_time():
    # 0.8 x 128 = 102.4, and a sixteenth of it for the half round that passed.
    assert limit_by([], seen(late=0.03, busy=0.9), seen(in_flight=102, answered=51)) == pytest.approx(102.4 * (1 + 1 / 32))


async def wrong_type():
    return 3


async def not_a_number():
    return ServerLoad(3, math.nan)


async def negative():
    return ServerLoad(-3, 0)


async def endless():
    return ServerLoad(3, 0, 0.1, math.inf)


async def words():
    return ServerLoad("many", 0)


async def refused():
    raise ConnectionError


async def gave_up():
    raise SystemExit(1)


async def cancelled():
    raise asyncio.CancelledError


async def hanging():
    await asyncio.sleep(60)


def not_asynchronous():
    return ServerLoad(1, 0)


@pytest.mark.parametrize(
    "ask",
    [wrong_type, not_a_number, negative, endless, words, refused, gave_up, cancelled, hanging, not_asynchronous],
    ids=lambda ask: ask.__name__,
)
async def test_a_load_that_fails_is_warned_of_once_and_asked_again(ask, monkeypatch, caplog):
    monkeypatch.setattr(_steering, "ANSWER_SECONDS", 0.01)
    asked = []

    def counted():
        asked.append(True)
        return ask() if len(asked) < 3 else right()

    async def right():
        return ServerLoad(1, 2)

    servers = Servers(counted)
    with caplog.at_level(logging.WARNING):
        assert [await servers.look(), await servers.look(), await servers.look()] == [None, None, ServerLoad(1, 2)]
    (record,) = caplog.records
    assert "server_load() failed" in record.getMessage()
    # It may know, so no more are tried until it tells.
    assert servers.told
    assert servers.unclear


async def test_a_rollout_that_ends_while_the_load_is_asked_isnt_held_up():
    task = asyncio.create_task(Servers(hanging).look())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
