"""Reading a server's load from its Prometheus page."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_gym.rollout import ServerLoad
from art_gym_agents._metrics import add_up, parse_load

# Names, labels and forms as vLLM 0.32 shows them, for two engines behind one API server.
PAGE = b"""\
# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 9876.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 12.0
vllm:num_requests_running{engine="1",model_name="tiny"} 3.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 4.0
vllm:num_requests_waiting{engine="1",model_name="tiny"} 0.0
# HELP vllm:num_requests_waiting_by_reason Number of waiting requests by reason.
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="deferred"} 0.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.8125
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 6.103515625e-05
# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="tiny"} 2.0
vllm:num_preemptions_total{engine="1",model_name="tiny"} 5.0
# HELP vllm:num_preemptions_created Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{engine="0",model_name="tiny"} 1.7645e+09
# HELP vllm:request_num_preemptions Histogram
vllm:request_num_preemptions_bucket{engine="0",le="1.0",model_name="tiny"} 77.0
vllm:request_num_preemptions_sum{engine="0",model_name="tiny"} 7.0
"""


def test_engines_are_summed_up_and_the_fullest_counts():
    assert parse_load(PAGE) == ServerLoad(running=15, waiting=4, cache_usage=0.8125, preemptions=7)


def test_the_older_name_of_the_cache_usage_is_read():
    page = b'vllm:num_requests_running{model_name="m"} 1.0\nvllm:gpu_cache_usage_perc{model_name="m"} 0.5\n'
    assert parse_load(page) == ServerLoad(running=1, waiting=0, cache_usage=0.5)


@pytest.mark.parametrize(
    "line",
    [
        b"vllm:num_requests_running 7",
        b"vllm:num_requests_running{} 7.0 1395066363000",
        b'vllm:num_requests_running{model_name="a} 3 \\" b\\n{",engine="0"} 7e0\r',
    ],
)
def test_a_line_in_another_legal_form_is_read(line):
    assert parse_load(b"# a comment\n" + line + b"\n") == ServerLoad(running=7, waiting=0)


@pytest.mark.parametrize(
    "page", [b"", b"<html>not found</html>", b"up 1\n", b"vllm:kv_cache_usage_perc 0.5\n", b"vllm:num_requests_running NaN\n"]
)
def test_another_page_gives_nothing(page):
    assert parse_load(page) is None


@given(st.binary() | st.tuples(st.sampled_from(PAGE.split()), st.binary()).map(b" ".join))
def test_no_page_raises(page):
    load = parse_load(page)
    assert load is None or isinstance(load, ServerLoad)


def test_huge_figures_are_no_counts():
    assert parse_load(b"vllm:num_requests_running 1e308\nvllm:num_requests_waiting +Inf\nvllm:num_requests_waiting 2\n") == ServerLoad(0, 2)


def test_servers_are_added_up():
    loads = [ServerLoad(1, 2, 0.5, 3), None, ServerLoad(10, 20, 0.25, 30)]
    assert add_up(loads) == ServerLoad(11, 22, 0.5, 33)
    assert add_up([None, None]) is None
