"""An engine that somebody else runs: an OpenAI endpoint, given by its address."""

from __future__ import annotations

from types import TracebackType

from art_gym.engine._http import StatusError, request
from art_gym.engine.control import ControlledServer
from art_gym.errors import UsageError


class AttachedEngine(ControlledServer):
    """A server on another machine or of another program. It is neither started nor stopped here.

    Anything OpenAI-compatible can be played with and evaluated. Training needs a vLLM server; what it must be started with is named by the
    error that its absence raises.

    Args:
        base_url: Such as "http://gpu-box:8000/v1"; without the path, "/v1" is added.
        model: The served name; by default the only one that the server has.
        api_key: Sent as bearer token.
    """

    def __init__(self, base_url: str, model: str | None = None, *, api_key: str | None = None) -> None:
        self.base_url = _endpoint(base_url)
        self.api_key = api_key
        self.model = model or ""

    def start(self, *, timeout: float = 10.0) -> AttachedEngine:
        """Look whether the server answers and has the model.

        Raises:
            UsageError: It doesn't answer, refuses the key, or hasn't the model.
        """
        try:
            answer = request(f"{self.base_url}/models", timeout=timeout, api_key=self.api_key)
            names = [str(entry["id"]) for entry in answer["data"]]
        except StatusError as error:
            raise UsageError(f"{self.base_url}/models answers {error}; expected an OpenAI-compatible endpoint and its API key") from error
        except OSError as error:
            raise UsageError(f"no server answers at {self.base_url}: {error}; start it, or correct the address") from error
        except (KeyError, TypeError) as error:
            raise UsageError(f"{self.base_url}/models gives no list of models; expected an OpenAI-compatible endpoint") from error
        if not self.model:
            if len(names) != 1:
                raise UsageError(f"{self.base_url} serves {len(names)} models; name one of: {', '.join(names)}")
            self.model = names[0]
        elif self.model not in names:
            raise UsageError(f"{self.base_url} has no model '{self.model}'; it serves: {', '.join(names)}")
        return self

    def stop(self) -> None:
        """Do nothing: the server is somebody else's."""

    def check(self) -> None:
        """Do nothing: a remote server that is away may come back, so that only a deadline decides."""

    def log_tail(self, lines: int = 30) -> str:
        return ""

    def __enter__(self) -> AttachedEngine:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def _endpoint(url: str) -> str:
    if "://" not in url:
        url = "http://" + url
    url = url.rstrip("/")
    return url if url.endswith("/v1") else url + "/v1"
