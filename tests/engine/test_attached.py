"""Using a server that somebody else runs."""

import pytest

from art_gym.engine import AttachedEngine
from art_gym.errors import UsageError


def serve(endpoint, *names: str) -> None:
    endpoint.answers["/v1/models"] = {"object": "list", "data": [{"id": name} for name in names]}


@pytest.mark.parametrize(
    ("given", "endpoint_url"),
    [
        ("http://box:8000/v1", "http://box:8000/v1"),
        ("http://box:8000", "http://box:8000/v1"),
        ("http://box:8000/v1/", "http://box:8000/v1"),
        ("https://box/api/v1", "https://box/api/v1"),
        ("box:8000", "http://box:8000/v1"),
    ],
)
def test_the_address_may_lack_scheme_and_path(given, endpoint_url):
    assert AttachedEngine(given).base_url == endpoint_url


def test_the_only_model_is_taken(endpoint):
    serve(endpoint, "only")
    with AttachedEngine(endpoint.url) as engine:
        assert engine.model == "only"
        assert engine.models() == ["only"]
        engine.check()
        assert engine.log_tail() == ""


def test_one_of_several_models_must_be_named(endpoint):
    serve(endpoint, "a", "b")
    with pytest.raises(UsageError, match="serves 2 models; name one of: a, b"):
        AttachedEngine(endpoint.url).start()
    assert AttachedEngine(endpoint.url, "b").start().model == "b"


def test_a_model_that_is_not_served_is_told(endpoint):
    serve(endpoint, "a")
    with pytest.raises(UsageError, match="has no model 'c'; it serves: a"):
        AttachedEngine(endpoint.url, "c").start()


def test_no_server_is_told():
    with pytest.raises(UsageError, match=r"no server answers at http://127.0.0.1:9/v1: .*refused.*; start it, or correct the address"):
        AttachedEngine("127.0.0.1:9").start()


def test_a_server_of_another_kind_is_told(endpoint):
    with pytest.raises(UsageError, match="answers HTTP 404: Not Found; expected an OpenAI-compatible endpoint"):
        AttachedEngine(endpoint.url).start()
    endpoint.answers["/v1/models"] = ["something"]
    with pytest.raises(UsageError, match="gives no list of models"):
        AttachedEngine(endpoint.url).start()


@pytest.mark.parametrize("url", ["ftp://box/v1", "http://box:abc", "http://box:70000", "http://[::1", "http://", "http://a..b", ""])
def test_what_is_no_address_is_told(url):
    with pytest.raises(UsageError, match="is no HTTP address"):
        AttachedEngine(url).start()


@pytest.mark.parametrize("key", ["secret\n", "schlüssel"])
def test_a_key_that_can_not_be_sent_is_told_and_not_shown(endpoint, key):
    with pytest.raises(UsageError, match="the API key holds characters that can't be sent") as caught:
        AttachedEngine(endpoint.url, api_key=key).start()
    assert key not in str(caught.value)
