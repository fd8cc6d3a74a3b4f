"""Which replica takes a request: affinity, load, and who lives. Without a network, on a clock of the test's own."""

import hashlib
import math
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_gym_agents._replicas import Replicas

URLS = [f"http://10.0.0.{n}:8000/v1" for n in range(1, 5)]


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def replicas(clock):
    return Replicas(URLS, clock)


def fail(replica, clock, times=3):
    for _ in range(times):
        replica.failed(clock())


def test_a_key_always_goes_to_the_one_with_the_highest_hash(replicas):
    for key in ("train-0", "train-1", "train-2", "a \ud800 key"):
        first = max(URLS, key=lambda url: hashlib.blake2b(f"{key}\n{url}".encode("utf-8", "surrogatepass"), digest_size=8).digest())
        assert {replicas.choose(key).url for _ in range(5)} == {first}


def test_the_choice_is_the_same_in_every_process(replicas):
    code = f"from art_gym_agents._replicas import Replicas; print([Replicas({URLS}).choose(str(n)).url for n in range(20)])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == str([replicas.choose(str(n)).url for n in range(20)])


def test_the_order_of_the_urls_does_not_matter(replicas):
    other = Replicas(URLS[::-1])
    assert all(replicas.choose(str(n)).url == other.choose(str(n)).url for n in range(100))


def test_keys_are_spread_evenly(replicas):
    counts = Counter(replicas.choose(str(n)).url for n in range(8000))
    # 2000 each, standard deviation 39.
    assert all(abs(counts[url] - 2000) < 200 for url in URLS)


def test_when_one_dies_only_its_own_keys_move(replicas, clock):
    before = {str(n): replicas.choose(str(n)) for n in range(400)}
    dead = replicas.all[1]
    fail(dead, clock)
    after = {key: replicas.choose(key) for key in before}
    assert {key for key in before if before[key] is not after[key]} == {key for key in before if before[key] is dead}
    assert len({after[key].url for key in before if before[key] is dead}) == 3
    dead.answered()
    assert {key: replicas.choose(key) for key in before} == before


def test_one_hot_key_spreads_over_all_within_the_bound(replicas):
    for taken in range(200):
        replica = replicas.choose("hot")
        replica.in_flight += 1
        assert replica.in_flight <= math.ceil(1.25 * (taken + 1) / 4)
    # 200 in flight: none has more than 63, so none less than 200 - 3 * 63.
    assert min(replica.in_flight for replica in replicas.all) >= 11


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3), st.booleans()), max_size=200))
def test_the_bound_holds_whatever_comes_and_ends(events):
    replicas = Replicas(URLS)
    for key, place, ends in events:
        if ends:
            replicas.all[place].in_flight = max(0, replicas.all[place].in_flight - 1)
            continue
        total = sum(replica.in_flight for replica in replicas.all)
        replica = replicas.choose(str(key), URLS[place])
        replica.in_flight += 1
        assert replica.in_flight <= math.ceil(1.25 * (total + 1) / 4)


def test_a_conversation_stays_at_its_home_while_that_has_room(replicas):
    first = replicas.choose("key")
    home = next(replica for replica in replicas.all if replica is not first)
    assert replicas.choose("key", home.url) is home
    # 4 in flight over 4 replicas: the fifth may be the second of one, not its fifth.
    home.in_flight = 4
    assert replicas.choose("key", home.url) is first


def test_a_home_that_no_server_has_any_more_is_forgotten(replicas):
    assert replicas.choose("key", "http://elsewhere/v1") is replicas.choose("key")


def test_three_failures_in_a_row_take_a_replica_out(replicas, clock):
    first = replicas.choose("key")
    fail(first, clock, 2)
    first.answered()
    fail(first, clock, 2)
    assert replicas.choose("key") is first
    fail(first, clock, 1)
    assert not first.alive
    assert replicas.choose("key", first.url) is not first


def test_a_dead_replica_is_probed_ever_more_seldom_and_once_at_a_time(replicas, clock):
    dead = replicas.all[0]
    fail(dead, clock)
    waits = []
    for _ in range(7):
        begin = clock.now
        while not (due := replicas.to_probe()):
            clock.now += 0.5
        assert due == [dead]
        assert replicas.to_probe() == []
        waits.append(clock.now - begin)
        dead.probed(False, clock())
    assert waits == [0.5, 1, 2, 4, 8, 10, 10]


def test_a_replica_may_be_dead_for_days(replicas, clock):
    dead = replicas.all[0]
    fail(dead, clock)
    for _ in range(20_000):
        clock.now += 10
        assert replicas.to_probe() == [dead]
        dead.probed(False, clock())


def test_one_that_is_back_only_to_fail_again_waits_longer_until_it_answers_a_request(replicas, clock):
    dead = replicas.all[0]
    fail(dead, clock)
    dead.probed(True, clock())
    assert dead.alive
    fail(dead, clock)
    assert dead.probe_at == clock.now + 1
    dead.probed(True, clock())
    dead.answered()
    fail(dead, clock)
    assert dead.probe_at == clock.now + 0.5


def test_a_probe_that_ends_after_a_request_did_changes_nothing(replicas, clock):
    dead = replicas.all[0]
    fail(dead, clock)
    dead.answered()
    dead.probed(False, clock())
    assert dead.alive


def test_while_one_rests_the_others_take_its_requests(replicas, clock):
    first = replicas.choose("key")
    first.rest(clock.now + 5)
    assert replicas.choose("key", first.url) is not first
    clock.now += 5
    assert replicas.choose("key") is first


def test_a_shorter_rest_does_not_end_a_longer_one(replicas, clock):
    first = replicas.choose("key")
    first.rest(clock.now + 5)
    first.rest(clock.now + 1)
    assert first.rests_until == clock.now + 5


def test_when_all_rest_the_first_to_be_back_is_next(replicas, clock):
    for seconds, replica in zip((9, 3, 5, 7), replicas.all, strict=True):
        replica.rest(clock.now + seconds)
    assert replicas.other("key", ()) is None
    assert replicas.choose("key") is replicas.all[1]
    assert replicas.next_ready() == 3
    # Those that live count; with none alive, all do.
    fail(replicas.all[1], clock)
    assert replicas.next_ready() == 5
    for replica in replicas.all:
        fail(replica, clock)
    assert replicas.next_ready() == 3


def test_when_all_are_dead_one_is_tried_all_the_same(replicas, clock):
    for replica in replicas.all:
        fail(replica, clock)
    assert replicas.choose("key") in replicas.all
    assert replicas.other("key", ()) is None


def test_another_is_none_of_those_tried(replicas):
    tried = set()
    while (replica := replicas.other("key", tried)) is not None:
        assert replica not in tried
        tried.add(replica)
    assert tried == set(replicas.all)


def test_a_single_server_takes_everything(clock):
    replicas = Replicas(URLS[:1], clock)
    (only,) = replicas.all
    only.in_flight = 10_000
    only.rest(clock.now + 60)
    fail(only, clock)
    assert replicas.choose("key") is only
