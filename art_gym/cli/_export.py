"""`art-gym export`: a checkpoint of a run as a folder that loads without art_gym, on this machine or on the hub."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import typer

from art_gym._version import __version__
from art_gym.cli import _standing, preflight
from art_gym.cli.config import RunConfig
from art_gym.cli.report import evaluation_table, read_evaluations, read_metrics
from art_gym.cli.run_folder import CONFIG, check_writable, named
from art_gym.errors import ArtGymError, UsageError
from art_gym_trainers import checkpoints
from art_gym_trainers.checkpoints import Checkpoint
from art_gym_trainers.export import Form, check_folder, check_push, export, push
from art_gym_trainers.models import ALIASES


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for, as the command line gave it."""

    run_dir: Path
    to: Path | None = None
    step: str = "latest"
    form: Form = "adapter"
    dtype: str | None = None
    push_to: str | None = None
    private: bool = False


def run(request: Request) -> None:
    """Check everything, write the folder, and push it if that was asked for.

    Raises:
        UsageError: It can't be done as asked; nothing was written.
        ArtGymError: The hub failed; what was written to a folder stays.
    """
    _check_options(request)
    folder = named(request.run_dir)
    if not (folder / CONFIG).is_file():
        raise UsageError(f"{folder} is not the folder of a run: it holds no {CONFIG}; give the --run-dir of an `art-gym train`")
    config = RunConfig.load(folder / CONFIG)
    checkpoint = checkpoints.read(folder / _standing.CHECKPOINTS, _step(request.step, config, folder))
    if request.to:
        check_folder(request.to)
        check_writable(request.to, option="--to")
    if request.push_to:
        check_push(request.push_to)
    if request.form == "merged":
        for package in ("torch", "transformers", "peft", "safetensors"):
            preflight.check_package("a merged export", package, extra="train")
    model_folder = preflight.resolve_model(config.model.name, _tell)
    with ExitStack() as stack:
        target = request.to or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "export"
        export(
            checkpoint,
            model_folder,
            target,
            form=request.form,
            dtype=request.dtype or "float32",
            base_dtype=config.model.dtype,
            base_name=_base_name(config, pushed=request.push_to is not None) or str(model_folder),
            card=card(config, folder, checkpoint, request.form),
        )
        what = f"{request.form} of batch {checkpoint.step}"
        if request.to:
            typer.echo(f"{what}: {request.to}")
        if request.push_to:
            try:
                url = push(target, request.push_to, private=request.private, message=f"{what} of {folder.name}, by art_gym {__version__}")
            except ArtGymError as error:
                kept = f"; the export is whole in {request.to}" if request.to else ""
                raise type(error)(f"{error}{kept}") from error
            typer.echo(f"{what}: {url}")


def card(config: RunConfig, folder: Path, checkpoint: Checkpoint, form: Form) -> str:
    """Write the model card: what was trained on what, how well it plays, and how it is loaded."""
    base = _hub_id(config)
    metadata = [f"base_model: {base}"] if base else []
    metadata += [f"library_name: {'peft' if form == 'adapter' else 'transformers'}", "pipeline_tag: text-generation"]
    tags = "\n".join(["tags:", *(f"- {tag}" for tag in ("art_gym", "reinforcement-learning", "grpo", "tool-use"))])
    name, evaluations, batches = _base_name(config, pushed=True), read_evaluations(folder), config.grpo.batches
    played = next((row for row in read_metrics(folder) if row["step"] == checkpoint.step + 1), None)
    figures = f"In the batch that it played, {played['success_rate']:.1%} of the training episodes succeeded. " if played else ""
    versions = ", ".join(f"{package} {version}" for package, version in checkpoint.details.get("versions", {}).items())
    arguments = ", ".join(f"{key}={value!r}" for key, value in config.env.kwargs.items())
    lines = [
        "---\n" + "\n".join([*metadata, tags]) + "\n---",
        f"# {folder.name}",
        f"{name}, trained with GRPO on {config.env.id}{f' ({arguments})' if arguments else ''} by art_gym {__version__}: "
        f"the policy after batch {checkpoint.step} of {batches}, seed {config.seed}. {figures}".rstrip(),
        "## Success on held-out scenarios",
        f"{config.evaluation.n} scenarios of the {config.evaluation.split} split. "
        + ("" if checkpoint.step == batches else f"“After GRPO” is the policy after batch {batches}, not this one."),
        evaluation_table(evaluations),
        "## Use",
        _snippet(name, form),
        f"It was sampled with temperature {config.rollout.temperature}, and tool calls are in vLLM's {config.engine.tool_parser} format.",
        f"Versions: {versions}." if versions else "",
    ]
    return "\n\n".join(line.rstrip() for line in lines if line) + "\n"


def _snippet(base: str, form: Form) -> str:
    if form == "merged":
        code = 'from transformers import AutoModelForCausalLM\n\nmodel = AutoModelForCausalLM.from_pretrained("FOLDER")'
    else:
        code = (
            "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
            f'model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "FOLDER")'
        )
    return f"```python\n{code}\n```"


def _check_options(request: Request) -> None:
    if not request.to and not request.push_to:
        raise UsageError("where to? give --to FOLDER, --push-to OWNER/NAME, or both")
    if request.private and not request.push_to:
        raise UsageError("--private is about the repository of --push-to; give both")
    if request.dtype and request.form == "adapter":
        raise UsageError("--dtype is of merged weights, and an adapter keeps its own; give --form merged too, or leave it out")


def _step(text: str, config: RunConfig, folder: Path) -> int:
    steps = checkpoints.steps(folder / _standing.CHECKPOINTS)
    if not steps:
        raise UsageError(f"{folder} has no checkpoint yet; the first is written after the first batch of GRPO")
    if text == "latest":
        return steps[-1]
    if text == "best":
        settings = config.checkpoints
        step = checkpoints.best(folder / _standing.CHECKPOINTS, _standing.scores(config, folder), settings.goal)
        if step is None:
            raise UsageError(
                f"no checkpoint of {folder} has a {settings.metric} yet, since the batch after it tells; give --step latest, or one of: "
                f"{', '.join(map(str, steps))}"
            )
        return step
    if not text.isdecimal():
        raise UsageError(f"--step {text!r}: expected latest, best, or a batch's number: {', '.join(map(str, steps))}")
    return int(text)


def _hub_id(config: RunConfig) -> str | None:
    name = config.model.name
    return None if name in ALIASES or Path(name).expanduser().exists() else name


def _base_name(config: RunConfig, *, pushed: bool) -> str:
    """How others name the base; empty where only this machine's folder tells. Nobody else is told where that lies."""
    return _hub_id(config) or (Path(config.model.name).name if pushed else "")


def _tell(line: str) -> None:
    typer.echo(line, err=True)
