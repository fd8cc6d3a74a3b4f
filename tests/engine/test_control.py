"""What the control calls send, and what they make of the answers."""

import socket
import threading
import time

import pytest

from art_gym.engine import AttachedEngine
from art_gym.engine._http import StatusError, persistent_request, request
from art_gym.errors import EngineError, UsageError


@pytest.fixture
def engine(endpoint) -> AttachedEngine:
    return AttachedEngine(endpoint.url, "m")


def test_reload_weights_reloads_and_then_forgets_prefixes(endpoint, engine):
    endpoint.answers |= {"/collective_rpc": {"results": [None]}, "/reset_prefix_cache": {"success": True}}
    engine.reload_weights()
    engine.reload_weights("/some/folder")
    assert [entry[:3] for entry in endpoint.requests] == [
        ("POST", "/collective_rpc", {"method": "reload_weights"}),
        ("POST", "/reset_prefix_cache", {}),
        ("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/some/folder"}}),
        ("POST", "/reset_prefix_cache", {}),
    ]


def test_reset_prefix_cache_waits_for_running_requests(endpoint, engine):
    endpoint.answers["/reset_prefix_cache"] = [{"success": False}, {"success": False}, {"success": True}]
    engine.reset_prefix_cache()
    assert len(endpoint.requests) == 3


def test_reset_prefix_cache_gives_up_at_the_deadline(endpoint, engine):
    endpoint.answers["/reset_prefix_cache"] = {"success": False}
    with pytest.raises(EngineError, match=r"within 0.2 s: requests are still running"):
        engine.reset_prefix_cache(timeout=0.2)


def test_adapters_are_loaded_and_unloaded_by_name(endpoint, engine):
    endpoint.answers |= {"/v1/load_lora_adapter": None, "/v1/unload_lora_adapter": None}
    engine.load_adapter("m@3", "/adapters/3")
    engine.unload_adapter("m@3")
    assert [entry[2] for entry in endpoint.requests] == [{"lora_name": "m@3", "lora_path": "/adapters/3"}, {"lora_name": "m@3"}]


def test_sleep_and_wake(endpoint, engine):
    endpoint.answers |= {"/sleep?level=2": {}, "/wake_up": {}}
    engine.sleep(level=2)
    engine.wake()
    assert [entry[1] for entry in endpoint.requests] == ["/sleep?level=2", "/wake_up"]


@pytest.mark.parametrize(
    ("ask", "way_out"),
    [
        (lambda engine: engine.reload_weights(), "VLLM_SERVER_DEV_MODE=1"),
        (lambda engine: engine.reset_prefix_cache(), "VLLM_SERVER_DEV_MODE=1"),
        (lambda engine: engine.load_adapter("a", "/a"), "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        (lambda engine: engine.unload_adapter("a"), "--enable-lora"),
        (lambda engine: engine.sleep(), "--enable-sleep-mode"),
        (lambda engine: engine.wake(), "--enable-sleep-mode"),
        (lambda engine: engine.prompt_logprobs([1, 2]), "vLLM"),
    ],
)
def test_what_a_server_does_not_offer_names_what_to_enable(engine, ask, way_out):
    with pytest.raises(UsageError, match="isn't offered by this server") as caught:
        ask(engine)
    assert way_out in str(caught.value)


def test_a_missing_adapter_is_not_taken_for_a_missing_feature(endpoint, engine):
    endpoint.answers["/v1/unload_lora_adapter"] = (404, {"error": {"message": "The lora adapter 'a' cannot be found.", "code": 404}})
    with pytest.raises(EngineError, match=r"HTTP 404: The lora adapter 'a' cannot be found."):
        engine.unload_adapter("a")


def test_prompt_logprobs_are_those_of_the_given_tokens(endpoint, engine):
    entries = [None, {"7": {"logprob": -0.5}, "9": {"logprob": -0.1}}, {"8": {"logprob": -2}}]
    endpoint.answers["/v1/completions"] = {"choices": [{"prompt_logprobs": entries}]}
    assert engine.prompt_logprobs([5, 7, 8], "m@2") == [-0.5, -2.0]
    sent = endpoint.requests[0][2]
    assert (sent["model"], sent["prompt"], sent["prompt_logprobs"]) == ("m@2", [5, 7, 8], 0)


def test_prompt_logprobs_needs_two_tokens(engine):
    with pytest.raises(UsageError, match="at least 2 tokens, got 1"):
        engine.prompt_logprobs([5])


def test_a_server_that_gives_no_prompt_logprobs_is_named(endpoint, engine):
    endpoint.answers["/v1/completions"] = {"choices": [{"text": "x"}]}
    with pytest.raises(UsageError, match="gives no prompt_logprobs; serve the model with vLLM"):
        engine.prompt_logprobs([5, 6])


def test_a_server_error_is_an_engine_error(endpoint, engine):
    endpoint.answers["/collective_rpc"] = (500, {"detail": "it broke"})
    with pytest.raises(EngineError, match="HTTP 500: it broke"):
        engine.reload_weights()


def test_a_refused_key_is_a_usage_error(endpoint, engine):
    endpoint.answers["/collective_rpc"] = (401, {"error": "Unauthorized"})
    with pytest.raises(UsageError, match="refuses the API key: Unauthorized"):
        engine.reload_weights()


def test_the_key_is_sent(endpoint):
    endpoint.answers["/v1/models"] = {"data": [{"id": "m"}]}
    assert AttachedEngine(endpoint.url, api_key="secret").start().model == "m"
    assert endpoint.requests[0][3] == "Bearer secret"


def test_a_server_that_is_briefly_away_is_waited_for():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # not listening yet: connections are refused
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"

        def come_back() -> None:
            time.sleep(0.7)
            listener.listen()
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n" + b'{"success":true}')

        thread = threading.Thread(target=come_back, daemon=True)
        thread.start()
        AttachedEngine(url, "m").reload_weights(timeout=20)
        thread.join(5)


def test_a_busy_answer_is_tried_again(endpoint):
    endpoint.answers["/v1/x"] = [(503, {}), (502, {}), {"ok": 1}]
    assert persistent_request(f"{endpoint.url}/x", {}, timeout=10) == {"ok": 1}


def test_a_dead_endpoint_ends_within_the_deadline():
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"http://127.0.0.1:9/v1/x gave no answer within 1 s: .*refused"):
        persistent_request("http://127.0.0.1:9/v1/x", timeout=1)
    assert time.monotonic() - started < 2


def test_a_silent_endpoint_ends_within_the_deadline():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with pytest.raises(EngineError, match=r"gave no answer within 0.6 s: timed out"):
            persistent_request(f"http://127.0.0.1:{listener.getsockname()[1]}/", timeout=0.6)


def test_waiting_stops_when_the_check_fails():
    def check() -> None:
        raise EngineError("it died")

    with pytest.raises(EngineError, match="it died"):
        persistent_request("http://127.0.0.1:9/", timeout=60, check=check)


def test_an_answer_that_is_no_http_is_a_connection_error():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"hello\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ConnectionError, match="BadStatusLine"):
            request(f"http://127.0.0.1:{listener.getsockname()[1]}/", timeout=5)


def test_a_plain_error_text_is_kept(endpoint):
    endpoint.answers["/v1/x"] = (400, ["not", "an object"])
    with pytest.raises(StatusError, match=r"HTTP 400: \['not', 'an object'\]"):
        request(f"{endpoint.url}/x", timeout=5)
