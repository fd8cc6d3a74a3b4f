"""Train an adapter on episodes that were recorded already, by one process or several: no engine, nothing is played.

    python examples/train_recorded.py runs/first/episodes/train-0001.jsonl --to adapter
    accelerate launch --num_processes 2 examples/train_recorded.py runs/first/episodes/train-0001.jsonl --to adapter

Each file is a batch: one optimiser step a group. Only the main process reads the files; the others are given the rows of each step.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from art_gym import EpisodeGroup
from art_gym.store import EpisodeStore
from art_gym_trainers.grpo import GRPOTrainer
from art_gym_trainers.grpo_config import grpo_config
from art_gym_trainers.models import resolve
from art_gym_trainers.policy import load_policy, load_tokenizer
from art_gym_trainers.rows import Row, batch_rows, split_steps


def batches(journals: list[Path]) -> Iterator[list[list[Row]]]:
    """Yield the rows of each journal, a list for each optimiser step."""
    for path in journals:
        groups: dict[str, EpisodeGroup] = {}
        with EpisodeStore(path.parent.parent) as store:
            for episode in store.journal(path.stem).latest().values():
                groups.setdefault(episode.scenario.id, EpisodeGroup(episode.scenario, [])).episodes.append(episode)
        kept, counts = batch_rows(list(groups.values()))
        print(f"{path.name}: {len(kept)} of {counts.groups} groups say something, {counts.sampled_tokens} sampled tokens")
        yield split_steps(kept, len(kept))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("journals", nargs="+", type=Path, help="files in the episodes folder of a run")
    parser.add_argument("--model", default="smollm2-135m", help="an alias, a folder, or a hub id")
    parser.add_argument("--to", type=Path, required=True, help="the adapter's folder")
    options = parser.parse_args()
    folder = resolve(options.model)
    trainer = GRPOTrainer(
        load_policy(folder),
        grpo_config(Path(tempfile.mkdtemp())),
        batches=batches(options.journals),
        processing_class=load_tokenizer(folder),
    )
    trainer.train()
    trainer.save_model(str(options.to))
    if trainer.accelerator.is_main_process:
        print(f"{trainer.state.global_step} steps; the adapter is in {options.to}")


if __name__ == "__main__":
    main()
