"""Exports: a checkpoint as a folder that loads without art_gym, and its way to the hub.

An adapter's folder is for PEFT, and for vLLM's LoRA; a merged one is a model like any other. A folder appears whole or not at all.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from art_gym._files import sync, sync_all
from art_gym.errors import ArtGymError, MissingExtra, UsageError
from art_gym_trainers.checkpoints import Checkpoint

if TYPE_CHECKING:
    from huggingface_hub import HfApi

Form = Literal["adapter", "merged"]

_ADAPTER_CONFIG = "adapter_config.json"
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "chat_template*", "*.model", "LICENSE*")
"""What goes with an adapter of the base's folder, so that whoever loads it writes prompts as they were trained on."""


def export(
    checkpoint: Checkpoint,
    model_folder: Path,
    folder: Path,
    *,
    form: Form = "adapter",
    dtype: str = "float32",
    base_dtype: str = "bfloat16",
    base_name: str | None = None,
    card: str = "",
) -> None:
    """Write a checkpoint's policy into a new folder.

    Args:
        checkpoint: Of a run.
        model_folder: The base model that it was trained on.
        folder: Not there yet, or empty.
        form: "adapter" for the adapter alone, "merged" for the whole model.
        dtype: Of a merged model's weights, "float32" or "bfloat16"; in bfloat16 most of a small update is rounded away.
        base_dtype: Of the base's weights when the policy was trained, the run's `model.dtype`.
        base_name: The base that an adapter's configuration names; `model_folder` if not given.
        card: Text of its README.md.

    Raises:
        UsageError: The folder isn't empty, or the checkpoint has no adapter.
    """
    check_folder(folder)
    has_adapter = (checkpoint.folder / _ADAPTER_CONFIG).is_file()
    if form == "adapter" and not has_adapter:
        raise UsageError(f"{checkpoint.folder} holds no adapter, since the whole model was trained; export it with --form merged")
    with _appearing(folder) as scratch:
        if form == "adapter":
            _write_adapter(checkpoint.folder, model_folder, scratch, base_name or str(model_folder))
        else:
            _write_merged(checkpoint.folder, model_folder, scratch, dtype, base_dtype if has_adapter else None)
        if card:
            (scratch / "README.md").write_text(card, encoding="utf-8")


def check_folder(folder: Path) -> None:
    """Check that nothing would be written over.

    Raises:
        UsageError: The folder is a file, or isn't empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is {'not empty' if folder.is_dir() else 'a file'}; give another --to")


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    scratch = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
        check_folder(folder)
        sync_all(scratch)
        os.replace(scratch, folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_adapter(saved: Path, model_folder: Path, folder: Path, base_name: str) -> None:
    settings = json.loads((saved / _ADAPTER_CONFIG).read_text(encoding="utf-8"))
    _write_json(folder / _ADAPTER_CONFIG, settings | {"base_model_name_or_path": base_name})
    for path in saved.glob("adapter_model*.safetensors"):
        shutil.copy(path, folder / path.name)
    for path in model_folder.iterdir():
        if path.is_file() and any(fnmatch.fnmatch(path.name, pattern) for pattern in _TOKENIZER):
            shutil.copy(path, folder / path.name)


def _write_merged(saved: Path, model_folder: Path, folder: Path, dtype: str, base_dtype: str | None) -> None:
    # Only here, since an adapter is exported without torch.
    from art_gym_trainers.policy import load_policy
    from art_gym_trainers.publish import copy_companions, merged_state, read_weights, write_weights

    copy_companions(model_folder, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # transformers before 4.56 reads the other name.
    _write_json(folder / "config.json", config | {"torch_dtype" if "torch_dtype" in config else "dtype": dtype})
    # From the base as it was trained on: what was measured is what is exported.
    state = merged_state(load_policy(model_folder, dtype=base_dtype, saved=saved), dtype) if base_dtype else read_weights(saved, dtype)
    write_weights(state, folder)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def check_push(repo_id: str) -> None:
    """Check what can be without asking the hub: the repository's name, and that there is a token.

    Raises:
        MissingExtra: huggingface_hub isn't installed.
        UsageError: The name can't be one, there is no token, or the hub is switched off.
    """
    hub = _hub()
    try:
        hub.utils.validate_repo_id(repo_id)
    except hub.errors.HFValidationError:
        raise UsageError(f"--push-to {repo_id!r}: expected OWNER/NAME, of letters, digits, '-', '_' and '.'") from None
    if hub.constants.HF_HUB_OFFLINE:
        raise UsageError("--push-to needs the hub, and HF_HUB_OFFLINE is set; unset it, or export with --to alone")
    if hub.get_token() is None:
        raise UsageError("--push-to needs a token of the hub with write access; set HF_TOKEN to it, or log in with `hf auth login`")


def push(folder: Path, repo_id: str, *, private: bool = False, message: str = "Upload with art_gym") -> str:
    """Upload an exported folder as one commit, into a repository that is made if there is none.

    Args:
        folder: As `export` wrote it.
        repo_id: "owner/name".
        private: Make the repository private, and refuse one that is there and public.
        message: The commit's.

    Returns:
        The repository's address.

    Raises:
        ArtGymError: The hub can't be reached, or the upload failed.
        UsageError: The hub refuses the token, or it may not write there; or what `check_push` refuses.
    """
    check_push(repo_id)
    hub = _hub()
    endpoint = hub.constants.ENDPOINT
    try:
        return _push(hub.HfApi(), folder, repo_id, private=private, message=message)
    except UsageError:
        raise
    except hub.errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status == 401:
            raise UsageError(f"{endpoint} doesn't know the token; make a new one with write access, and set HF_TOKEN to it") from error
        if status in (403, 404):
            raise UsageError(
                f"the token may not write to {repo_id} on {endpoint}; use one with write access, or a name of your own for --push-to"
            ) from error
        raise ArtGymError(f"{endpoint} refused the upload of {repo_id} (HTTP {status}): {_line(error)}; try again later") from error
    except Exception as error:  # The hub client lets its HTTP library's own errors through, whichever it uses.
        raise ArtGymError(f"the upload to {endpoint} failed: {_line(error)}; look at the network, or at HF_ENDPOINT") from error


def _push(api: HfApi, folder: Path, repo_id: str, *, private: bool, message: str) -> str:
    # None leaves it to the owner's own default; a repository that is there keeps what it is.
    url = api.create_repo(repo_id, private=private or None, exist_ok=True)
    if private and not api.model_info(repo_id).private:
        raise UsageError(f"{url} is there already and public; make it private on its settings page, or give another --push-to")
    api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message)
    return str(url)


def _line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise MissingExtra("--push-to", extra="train", package="huggingface_hub") from error
    return huggingface_hub
