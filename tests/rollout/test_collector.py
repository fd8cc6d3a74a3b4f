"""Full garbage collections get rarer while a rollout would be held up by them, and are as before afterwards."""

import gc

import pytest

from art_gym.rollout import _collector
from art_gym.rollout._collector import rarer_collections


@pytest.fixture(autouse=True)
def thresholds():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)
    assert _collector._watch not in gc.callbacks


def collect_fully(monkeypatch, seconds, apart):
    """As if a full collection took so long, and came so long after the one before."""
    now = [1000.0]
    monkeypatch.setattr(_collector, "monotonic", lambda: now[0])
    _collector._watch._last = 1000.0
    now[0] += apart - seconds
    _collector._watch("start", {"generation": 2})
    now[0] += seconds
    _collector._watch("stop", {"generation": 2})


def test_collections_that_take_much_of_the_time_get_rarer(monkeypatch):
    with rarer_collections():
        collect_fully(monkeypatch, seconds=0.03, apart=1.0)
        assert gc.get_threshold() == (700, 10, 40)
        collect_fully(monkeypatch, seconds=0.03, apart=1.0)
        assert gc.get_threshold() == (700, 10, 160)
    assert gc.get_threshold() == (700, 10, 10)


def test_collections_that_take_little_stay_as_they_are(monkeypatch):
    with rarer_collections():
        collect_fully(monkeypatch, seconds=0.01, apart=1.0)
        assert gc.get_threshold() == (700, 10, 10)


def test_young_collections_are_left_alone():
    with rarer_collections():
        _collector._watch("start", {"generation": 0})
        _collector._watch("stop", {"generation": 0})
        assert gc.get_threshold() == (700, 10, 10)


def test_the_last_rollout_that_ends_puts_things_back(monkeypatch):
    with rarer_collections():
        with rarer_collections():
            collect_fully(monkeypatch, seconds=0.5, apart=1.0)
        assert gc.get_threshold() == (700, 10, 40)
    assert gc.get_threshold() == (700, 10, 10)
