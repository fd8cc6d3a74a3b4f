"""The commands, their options, and how an error becomes one line and an exit code.

What a command does lies in the modules beside this one.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from art_gym._version import __version__
from art_gym.errors import ArtGymError, RunStopped, UsageError
from art_gym.scenarios import Split

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells give it."""

STOPPED = 3
"""The exit code of a run that an alarm stopped."""

TRACEBACK = "ART_GYM_TRACEBACK"
"""The environment variable that asks for the traceback of an unexpected error."""

app = typer.Typer(
    name="art-gym",
    help="Train LLM agents with reinforcement learning on tasks written as multi-turn Gymnasium environments.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

EnvKwargs = Annotated[list[str] | None, typer.Option("--env", "-e", metavar="KEY=VALUE", help="An argument of the environment; repeatable.")]


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command; see `art_gym.cli.main`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        # Without arguments there is nothing to do but to tell what there is.
        code = typer.main.get_command(app).main(list(arguments) or ["--help"], prog_name="art-gym", standalone_mode=False)
    except typer.TyperException as error:
        return _fail(error.format_message().replace("Value error, ", ""), 2)
    except UsageError as error:
        return _fail(str(error), 2)
    except RunStopped as error:
        return _fail(str(error), STOPPED)
    except ArtGymError as error:
        return _fail(str(error), 1, lines=True)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", INTERRUPTED)
    except OSError as error:
        _show_traceback(error)
        reason = error.strerror or str(error) or type(error).__name__
        return _fail(f"{error.filename}: {reason}" if error.filename else reason, 1)
    except Exception as error:  # noqa: BLE001  what nobody expected is a bug, and has no other place left to be told in one line
        _show_traceback(error)
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        return _fail(f"internal error: {what}; with {TRACEBACK}=1 the traceback is shown", 1)
    # Commands return nothing; typer returns the code of an explicit exit, and 130 after Ctrl-C.
    if code == INTERRUPTED:
        return _fail("interrupted", code)
    return code if isinstance(code, int) else 0


def _show_traceback(error: Exception) -> None:
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)


def _fail(text: str, code: int, *, lines: bool = False) -> int:
    # One line, except for the tail of an engine's log.
    print(f"error: {text if lines else ' '.join(text.split())}", file=sys.stderr)  # noqa: T201
    return code


def _version(value: bool) -> None:
    if value:
        typer.echo(f"art-gym {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)] = False,
) -> None:
    pass


@app.command()
def envs(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the registered environments and their arguments."""
    from art_gym.cli import environments

    environments.show(as_json=json)


@app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The package's name, such as my_task.")],
    folder: Annotated[Path, typer.Option("--dir", metavar="FOLDER", help="Where the package's folder is made.")] = Path(),
) -> None:
    """Write a new package with an environment, its registration and its tests."""
    from art_gym.cli import _new

    _new.run(name, folder=folder)


@app.command()
def check(
    env_id: Annotated[
        str, typer.Argument(metavar="ENV_ID", help="The environment, such as art_gym/Lookup-v0 or my_package:my_package/MyTask-v0.")
    ],
    examples: Annotated[int, typer.Option(min=1, help="Lists of actions that are played to test the transitions.")] = 100,
    seed: Annotated[int | None, typer.Option(min=0, help="Play the same lists of actions every time; without it, new ones.")] = None,
    skip: Annotated[
        list[str] | None, typer.Option(metavar="CHECK", help="Leave out a check, such as pickling; its name as the table shows it; repeatable.")
    ] = None,
    script: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a Python script that reproduces what is wrong with the transitions there.")
    ] = None,
) -> None:
    """Check that an environment keeps Gymnasium's contract and this project's, whatever actions it gets."""
    from art_gym.cli import _check

    _check.run(env_id, examples=examples, seed=seed, skip=skip or [], script=script)


@app.command("eval")
def evaluate(
    env_id: Annotated[str, typer.Argument(metavar="ENV_ID", help="The environment, such as art_gym/Lookup-v0; `art-gym envs` lists them.")],
    agent: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]SPEC",
            help="Who plays: chat (what --model or --base-url says), random, warm-start (the script that runs begin with), human, "
            "MODULE:FUNCTION (your script), http://HOST:PORT/v1#MODEL, a model, or the folder of a model, run, checkpoint or adapter. "
            "Repeatable: all play the same scenarios.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model that plays: smollm2-135m, a folder or a hub id; with --base-url the name it is served under.")
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(metavar="URL", help="A running OpenAI-compatible server, such as http://127.0.0.1:8000/v1.")
    ] = None,
    split: Annotated[Split, typer.Option(help="Which scenarios are played.")] = "test",
    n: Annotated[int, typer.Option("--n", min=1, help="How many scenarios are played.")] = 200,
    k: Annotated[int, typer.Option("--k", min=1, help="How many episodes of each are played, for pass@k.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="Episodes at the same time.")] = 32,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="Sampling temperature of a chat model.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one reply of a chat model.")] = 64,
    max_model_len: Annotated[int, typer.Option(min=16, help="Longest conversation of a launched model, in tokens.")] = 2048,
    env: EnvKwargs = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent to the servers that run already.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Keep the result and every episode there.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the evaluation in --out: play only what is missing; agents may be added.")
    ] = False,
    keep_failures: Annotated[
        bool, typer.Option("--keep-failures", help="With --resume: let failed episodes stand instead of playing them again.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the launched server; 0 picks a free one.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the permutation tests' random patterns; it changes nothing of what is played.")] = 0,
    max_failure_rate: Annotated[float, typer.Option(min=0.0, max=1.0, help="Give up when a larger share of the episodes fails.")] = 1.0,
    isolation: Annotated[
        Literal["auto", "loop", "thread", "process", "ray"],
        typer.Option(help="Where environments live: auto takes the event loop for instant ones, else threads."),
    ] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Play held-out scenarios with one agent or several, and report how well they do and how sure that is."""
    from art_gym.cli import _eval
    from art_gym.cli.values import parse_assignments

    settings = _eval.Settings(
        env_id=env_id,
        agents=_eval.parse_agents(agent or [], model=model, base_url=base_url),
        env_kwargs=parse_assignments(env or [], "--env"),
        model=model,
        base_url=base_url,
        split=split,
        n=n,
        k=k,
        concurrency=concurrency,
        temperature=temperature,
        max_tokens=max_tokens,
        max_model_len=max_model_len,
        port=port,
        seed=seed,
        max_failure_rate=max_failure_rate,
        isolation=isolation,
        keep_failures=keep_failures,
    )
    _eval.run(settings, api_key=api_key, out=out, resume=resume, as_json=json)


@app.command()
def train(
    env_id: Annotated[
        str | None, typer.Argument(metavar="[ENV_ID]", help="The environment; may be left out where --config or --resume names it.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model that learns: smollm2-135m, a folder or a hub id.")] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A run's configuration in YAML, instead of the bundled recipe for the environment.")
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(metavar="FOLDER", help="The run's folder; runs/NAME-seedSEED if not given.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The run's seed.")] = None,
    env: EnvKwargs = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting, such as grpo.batches=12; repeatable.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew; a run in the folder is moved aside to NAME.old-1.")] = False,
    show_config: Annotated[bool, typer.Option("--show-config", help="Print the whole configuration and start nothing.")] = False,
) -> None:
    """Teach a model an environment: measure it, warm it up, train it with GRPO, measure it again."""
    from art_gym.cli import _launch

    request = _launch.Request(env_id=env_id, model=model, config=config, run_dir=run_dir, seed=seed, env=env or [], assignments=set_ or [])
    _launch.run(request, resume=resume, fresh=fresh, show_config=show_config)


@app.command()
def serve(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="smollm2-135m, a folder or a hub id; may be left out where --dir goes on with one.")
    ] = None,
    adapter: Annotated[Path | None, typer.Option(metavar="FOLDER", help="A LoRA adapter to begin with, such as a run's checkpoint.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--dir", metavar="FOLDER", help="Where episodes, jobs and checkpoints are kept; serve/NAME if not given.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The name that clients ask for; the model's if not given.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; any but a loopback one needs API keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8000,
    attach: Annotated[
        str | None, typer.Option(metavar="URL", help="A running vLLM server that takes adapters; nothing is launched then.")
    ] = None,
    public_url: Annotated[
        str | None, typer.Option(metavar="URL", help="The address that clients know, if a reverse proxy has another.")
    ] = None,
    api_keys: Annotated[
        Path | None, typer.Option(metavar="FILE", help="API keys, a line each; or give them in ART_GYM_API_KEYS, with commas between.")
    ] = None,
    alias: Annotated[
        list[str] | None, typer.Option(metavar="MODEL", help='Another name that clients may ask for, such as gpt-4o; "*" for any; repeatable.')
    ] = None,
    capture_all: Annotated[bool, typer.Option("--capture-all", help="Make an episode of each call that belongs to none.")] = False,
    temperature: Annotated[float, typer.Option(min=0.01, max=2.0, help="Sampling temperature of captured calls.")] = 1.0,
    client_sampling: Annotated[
        bool, typer.Option("--client-sampling", help="Sample captured calls as clients ask instead; all episodes of a job must agree.")
    ] = False,
    no_train: Annotated[bool, typer.Option("--no-train", help="Capture and never train; nothing of torch is needed then.")] = False,
    limit: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A limit of the gateway, such as open_episodes=100; repeatable.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any setting of engine or trainer, such as engine.max_model_len=4096."),
    ] = None,
    shutdown_seconds: Annotated[float, typer.Option(min=1, max=3600, help="How long a signal lets calls and jobs go on.")] = 30.0,
) -> None:
    """Serve a model to agents that speak OpenAI: capture what they do, take rewards, and train it through an API."""
    from art_gym.cli import _serve

    request = _serve.Request(
        model=model,
        adapter=adapter,
        folder=folder,
        name=name,
        host=host,
        port=port,
        attach=attach,
        public_url=public_url,
        api_keys=api_keys,
        aliases=alias or [],
        capture_all=capture_all,
        temperature=temperature,
        client_sampling=client_sampling,
        train=not no_train,
        limits=limit or [],
        assignments=set_ or [],
        shutdown_seconds=shutdown_seconds,
    )
    _serve.run(request)


@app.command("export")
def export_(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run, such as runs/Lookup-v0-seed0.")],
    to: Annotated[Path | None, typer.Option(metavar="FOLDER", help="The folder to write; not there yet, or empty.")] = None,
    step: Annotated[
        str, typer.Option(metavar="STEP", help="The checkpoint: latest, best (by checkpoints.metric), or a batch's number.")
    ] = "latest",
    form: Annotated[
        Literal["adapter", "merged"], typer.Option(help="The adapter alone, for PEFT; or a whole model, for transformers and vLLM.")
    ] = "adapter",
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Precision of merged weights: float32 if not given; bfloat16 is half as large and rounds small updates away."),
    ] = None,
    push_to: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload it to this repository of the Hugging Face hub, with a model card.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make the repository of --push-to private.")] = False,
) -> None:
    """Write a checkpoint's policy as a folder that loads without art_gym, or upload it to the hub."""
    from art_gym.cli import _export

    _export.run(_export.Request(run_dir=run_dir, to=to, step=step, form=form, dtype=dtype, push_to=push_to, private=private))


episodes = typer.Typer(help="Look at the episodes that a run or an evaluation recorded.")
app.add_typer(episodes, name="episodes")

EpisodesFile = Annotated[Path, typer.Argument(metavar="FILE", help="A label's file, such as runs/first/episodes/train-0001.jsonl.")]


@episodes.callback(invoke_without_command=True)
def _episodes_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@episodes.command("ls")
def list_episodes(
    path: Annotated[Path, typer.Argument(metavar="RUN|FILE", help="The folder of a run, or one of the files in its folder episodes/.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List what a run recorded, label by label; or the episodes of one label: scenario, reward, turns, tokens, and how each ended."""
    from art_gym.cli import _episodes

    _episodes.ls(path, as_json=json)


@episodes.command("show")
def show_episode(
    file: EpisodesFile,
    episode: Annotated[
        str | None, typer.Option(metavar="ID", help="Which episode, as `art-gym episodes ls` names it; by default the first.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Show tokens as text: smollm2-135m, a model's folder or a hub id; without it, ids.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show every token of long stretches of context.")] = False,
) -> None:
    """Print an episode token by token: context or sampled, with log-probability and advantage."""
    from art_gym.cli import _episodes

    _episodes.show(file, episode, tokenizer=tokenizer, everything=everything)


@episodes.command("export")
def export_episodes(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or of `art-gym eval --out`.")],
    to: Annotated[Path, typer.Option(metavar="FILE", help="The file to write: .parquet or .jsonl.")],
    label: Annotated[
        list[str] | None, typer.Option(metavar="LABEL", help="Only this label, such as train-0001; repeatable. All, if none is given.")
    ] = None,
    successful: Annotated[bool, typer.Option("--successful", help="Only episodes that succeeded.")] = False,
    form: Annotated[
        Literal["episodes", "sft"],
        typer.Option("--format", help="Episodes exactly as they are; or sft: conversations with tools, as TRL's SFTTrainer takes them."),
    ] = "episodes",
    force: Annotated[bool, typer.Option("--force", help="Write over the file.")] = False,
) -> None:
    """Write the episodes of a run into one file."""
    from art_gym.cli import _episodes_export

    request = _episodes_export.Request(run=run_dir, to=to, labels=tuple(label or ()), successful=successful, form=form, force=force)
    _episodes_export.run(request)


@episodes.command("compact")
def compact_episodes(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or of `art-gym eval --out`.")],
    label: Annotated[
        list[str] | None, typer.Option(metavar="LABEL", help="Only this label, such as train-0001; repeatable. All, if none is given.")
    ] = None,
) -> None:
    """Make the journals of a run into Parquet files, which are much smaller; those that are being written stay."""
    from art_gym.cli import _episodes_compact

    _episodes_compact.run(run_dir, label or ())
