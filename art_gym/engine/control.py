"""What can be asked of a running inference server, whoever launched it."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from art_gym.engine._http import StatusError, persistent_request
from art_gym.errors import EngineError, UsageError


class ControlledServer(ABC):
    """A vLLM server that answers on `base_url`. Its calls block; each has a deadline in seconds and waits for a server that is briefly away.

    Attributes:
        base_url: The OpenAI endpoint, such as "http://127.0.0.1:8000/v1".
        model: The served name of the model.
        api_key: Sent with every request, if any.
    """

    base_url: str
    model: str
    api_key: str | None = None

    @abstractmethod
    def check(self) -> None:
        """Return if the server can go on.

        Raises:
            EngineError: It can't; the text carries the tail of its log where there is one.
        """

    @abstractmethod
    def log_tail(self, lines: int = 30) -> str:
        """Give the last lines of the server's log; empty if there is none."""

    def reload_weights(self, path: str | os.PathLike[str] | None = None, *, timeout: float = 120.0) -> None:
        """Read the weights again, in place, and forget everything computed from the old ones.

        No request may be running. On the CPU vLLM 0.32 keeps the old output layer where it is tied to the embedding: an update must leave
        these alone, as LoRA on the linear layers does.

        Args:
            path: Folder to read them from; by default the one that was read last.
            timeout: Deadline in seconds.

        Raises:
            EngineError: It could not be done.
            UsageError: The server doesn't offer it; the text says how to enable it.
        """
        body: dict[str, Any] = {"method": "reload_weights"}
        if path is not None:
            body["kwargs"] = {"weights_path": os.fspath(path)}
        self._ask("/collective_rpc", body, timeout=timeout, enable="start vLLM with VLLM_SERVER_DEV_MODE=1")
        self.reset_prefix_cache(timeout=timeout)

    def reset_prefix_cache(self, *, timeout: float = 60.0) -> None:
        """Forget cached prefixes. Waits until no running request holds any.

        Raises:
            EngineError: Requests still held the cache at the deadline.
            UsageError: The server doesn't offer it.
        """
        deadline = time.monotonic() + timeout
        while True:
            answer = self._ask("/reset_prefix_cache", {}, timeout=timeout, enable="start vLLM with VLLM_SERVER_DEV_MODE=1")
            if not isinstance(answer, Mapping) or answer.get("success", True):
                return
            if time.monotonic() > deadline:
                raise EngineError(f"the prefix cache could not be reset within {timeout:g} s: requests are still running")
            time.sleep(0.1)

    def load_adapter(self, name: str, path: str | os.PathLike[str], *, timeout: float = 120.0) -> None:
        """Serve the LoRA adapter in folder `path` under `name`, beside the base model.

        Raises:
            EngineError: The server refused it.
            UsageError: The server takes no adapters at run time; the text says how to enable it.
        """
        body = {"lora_name": name, "lora_path": os.fspath(path)}
        self._ask("/v1/load_lora_adapter", body, timeout=timeout, enable=_ENABLE_LORA)

    def unload_adapter(self, name: str, *, timeout: float = 60.0) -> None:
        """Stop serving the adapter `name`.

        Raises:
            EngineError: There is none of that name.
            UsageError: The server takes no adapters at run time.
        """
        self._ask("/v1/unload_lora_adapter", {"lora_name": name}, timeout=timeout, enable=_ENABLE_LORA)

    def sleep(self, *, level: int = 1, timeout: float = 120.0) -> None:
        """Give the GPU's memory back until `wake`; level 1 keeps the weights in RAM, level 2 drops them. The CPU backend ignores it.

        Raises:
            UsageError: The server doesn't offer it.
        """
        self._ask(f"/sleep?level={level}", {}, timeout=timeout, enable=_ENABLE_SLEEP)

    def wake(self, *, timeout: float = 120.0) -> None:
        """Undo `sleep`."""
        self._ask("/wake_up", {}, timeout=timeout, enable=_ENABLE_SLEEP)

    def prompt_logprobs(self, token_ids: Sequence[int], model: str | None = None, *, timeout: float = 120.0) -> list[float]:
        """Compute the log-probability of each token after the first, given those before it, under the served model or the adapter `model`.

        Returns:
            `len(token_ids) - 1` values, at temperature 1.

        Raises:
            EngineError: The server refused the request.
        """
        ids = list(token_ids)
        if len(ids) < 2:
            raise UsageError(f"prompt_logprobs needs at least 2 tokens, got {len(ids)}")
        body = {"model": model or self.model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer = self._ask("/v1/completions", body, timeout=timeout, enable="serve the model with vLLM")
        entries = answer["choices"][0].get("prompt_logprobs")
        if entries is None:
            raise UsageError(f"{self.base_url} gives no prompt_logprobs; serve the model with vLLM")
        return [float(entry[str(token)]["logprob"]) for entry, token in zip(entries[1:], ids[1:], strict=True)]

    def models(self, *, timeout: float = 30.0) -> list[str]:
        """List the names that the server answers to: the model, and the adapters that are loaded."""
        answer = self._ask("/v1/models", None, timeout=timeout, enable="give the address of an OpenAI-compatible endpoint")
        return [str(entry["id"]) for entry in answer["data"]]

    def _ask(self, path: str, body: Mapping[str, Any] | None, *, timeout: float, enable: str) -> Any:
        """Send `path` (from the server's root) and translate errors; `enable` tells the user what a server without that path needs."""
        url = self._root + path
        try:
            return persistent_request(url, body, timeout=timeout, api_key=self.api_key, check=self.check)
        except StatusError as error:
            if error.status in (404, 405, 501) and not _is_about_content(error.text):
                raise UsageError(f"{url} isn't offered by this server: {enable}") from error
            if error.status in (401, 403):
                raise UsageError(f"{url} refuses the API key: {error.text}") from error
            tail = self.log_tail()
            raise EngineError(f"{url} failed with {error}" + (f"\n{tail}" if tail and error.status >= 500 else "")) from error

    @property
    def _root(self) -> str:
        return self.base_url.rstrip("/").removesuffix("/v1")


_ENABLE_LORA = "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 (EngineConfig: enable_lora)"
_ENABLE_SLEEP = "start vLLM with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1 (EngineConfig: enable_sleep)"


def _is_about_content(text: str) -> bool:
    """Whether a 404 is about a missing model or adapter, and not about the path: the framework's own text for that is "Not Found"."""
    return text.strip().lower() not in ("", "not found", "method not allowed")
