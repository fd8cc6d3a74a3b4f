"""Record: the files that episodes are kept in."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import gymnasium
import pytest

import art_gym
from art_gym import Episode, EpisodeStore, UsageError, call
from art_gym.wrappers import Record, recording


def episodes(folder: Path) -> list[Episode]:
    return list(EpisodeStore(folder).journal("episodes").read())


def test_a_folder_is_the_one_of_the_time_when_it_was_given(vault: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    env = Record(vault(), "run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    env.reset(seed=3)
    env.step(call("peek"))
    env.close()
    assert len(episodes(tmp_path / "run")) == 1


def test_a_label_that_is_no_file_name_is_told_at_once(vault: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'a/b' can't label episodes"):
        Record(vault(), tmp_path, "a/b")


@pytest.mark.parametrize("where", ["file", "file/deeper", "/proc/run"])
def test_a_folder_that_cannot_be_written_is_told_at_once(vault: Any, tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match=r"^episodes can't be written to .*; make that writable, or choose another folder$"):
        Record(vault(), tmp_path / where)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_name_that_no_file_has_is_told_at_once(vault: Any) -> None:
    with pytest.raises(UsageError, match=r"episodes can't be written to 'a\\x00b/episodes/episodes\.jsonl': embedded null byte"):
        Record(vault(), "a\0b")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_vector_environments_record_to_one_label(tmp_path: Path, mode: str) -> None:
    from functools import partial

    envs = gymnasium.make_vec(
        "art_gym_envs:art_gym/GuessNumber-v0", num_envs=3, vectorization_mode=mode, wrappers=[partial(Record, folder=tmp_path)], max_turns=1
    )
    try:
        envs.reset(seed=5)
        actions = tuple(call("guess", number=1) for _ in range(3))
        for _ in range(3):
            envs.step(actions)
    finally:
        envs.close()
    kept = episodes(tmp_path)
    # Every other step resets.
    assert len(kept) == 6
    assert {5, 6, 7} < {episode.scenario.seed for episode in kept}
    assert all(art_gym.replay(art_gym.make("art_gym/GuessNumber-v0", max_turns=1), episode) is None for episode in kept)


def test_a_journal_that_stays_locked_is_told(vault: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "LOCK_SECONDS", 0.05)
    (tmp_path / "episodes").mkdir()
    env = Record(vault(), tmp_path)
    env.reset(seed=3)
    env.step(call("peek"))
    with (tmp_path / "episodes/episodes.jsonl").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="is being written by another process"):
            env.close()


def test_the_environment_is_closed_even_if_the_disk_refuses(vault: Any, tmp_path: Path) -> None:
    class Closing(vault):
        closed = False

        def close(self) -> None:
            self.closed = True

    env = Record(Closing(), tmp_path)
    (tmp_path / "episodes").write_text("in the way")
    env.reset(seed=3)
    env.step(call("peek"))
    with pytest.raises(OSError, match="episodes"):
        env.close()
    assert env.unwrapped.closed


@pytest.mark.slow
def test_a_killed_process_leaves_every_finished_episode(tmp_path: Path) -> None:
    program = """
        import os, sys, art_gym
        from art_gym.wrappers import Record
        env = Record(art_gym.make("art_gym/GuessNumber-v0", max_turns=1), sys.argv[1])
        for seed in range(2):
            env.reset(seed=seed)
            env.step(art_gym.say("Hm."))
        env.reset(seed=9)
        os._exit(9)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program), tmp_path], check=False)
    assert (ended.returncode, [episode.scenario.seed for episode in episodes(tmp_path)]) == (9, [0, 1])
    (line, _) = (tmp_path / "episodes/episodes.jsonl").read_text().splitlines()
    assert json.loads(line)["env_id"] == "art_gym/GuessNumber-v0"
