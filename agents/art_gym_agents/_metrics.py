"""The load of a vLLM server, out of the page that it shows Prometheus.

The page has a thousand lines of histograms, of which four names matter: they are searched for rather than parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from art_gym.rollout import ServerLoad

# A label's value may hold anything, with quotes, backslashes and line ends escaped.
_LABELS = rb'(?:\{(?:[^"}\n]|"(?:[^"\\\n]|\\.)*")*\})?'
_SAMPLE = re.compile(
    rb"\nvllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|gpu_cache_usage_perc|num_preemptions_total)"
    + _LABELS
    + rb"[ \t]+(\S+)"
)

_LARGEST = 2.0**63
"""What is beyond, or no number at all, is no count."""


def parse_load(page: bytes) -> ServerLoad | None:
    """Return what one server shows, summed up over its engines; None if it isn't vLLM's page."""
    samples = [(name, value) for name, text in _SAMPLE.findall(b"\n" + page) if (value := _number(text)) is not None]
    if not any(name.startswith(b"num_requests") for name, _ in samples):
        return None
    return ServerLoad(
        running=int(sum(value for name, value in samples if name == b"num_requests_running")),
        waiting=int(sum(value for name, value in samples if name == b"num_requests_waiting")),
        cache_usage=max((value for name, value in samples if name.endswith(b"cache_usage_perc")), default=0.0),
        preemptions=int(sum(value for name, value in samples if name == b"num_preemptions_total")),
    )


def add_up(loads: Iterable[ServerLoad | None]) -> ServerLoad | None:
    """Return the load of several servers together, of those that tell it; None if none does."""
    known = [load for load in loads if load is not None]
    if not known:
        return None
    return ServerLoad(
        running=sum(load.running for load in known),
        waiting=sum(load.waiting for load in known),
        cache_usage=max(load.cache_usage for load in known),
        preemptions=sum(load.preemptions for load in known),
    )


def _number(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < _LARGEST else None
