"""What a run keeps after each batch, what it goes on from, and when it doesn't: with rows made by hand."""

import json
import math
import shutil

import pytest

from art_gym.cli import _standing, main
from art_gym.cli.config import RunConfig
from art_gym.cli.report import read_metrics
from art_gym.errors import RunStopped, UsageError
from art_gym_trainers import checkpoints

pytest.importorskip("torch")

FIGURES = {"reward": 0.5, "entropy": 0.1, "kl_sampler": 0.001, "logprob_difference": 0.001, "not_finite": 0, "loss": 0.1}


def config(**sections) -> RunConfig:
    return RunConfig.from_values({"env": {"id": "art_gym/Lookup-v0"}, **sections})


def save(folder) -> None:
    for name in ("adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"):
        (folder / name).write_bytes(name.encode())


def keep(folder, step: int, settings: RunConfig | None = None, **figures):
    row = {"step": step, "phase": "grpo", "success_rate": 0.5, **FIGURES, **figures}
    return _standing.keep(settings or config(), folder, row, save=save, details={"next_scenario": 8 * step})


def kept(folder) -> list[int]:
    return checkpoints.steps(folder / "checkpoints")


def test_a_batch_is_kept_with_its_row_and_where_the_run_stands(tmp_path):
    assert keep(tmp_path, 1) == []
    saved = _standing.found(config(), tmp_path)
    (row,) = read_metrics(tmp_path)
    assert row["alarms"] == []
    assert saved.details["metrics"] == row
    assert (saved.details["next_scenario"], saved.details["seed"]) == (8, 0)
    assert set(saved.details["versions"]) == {"art_gym", "torch", "transformers", "peft", "trl"}
    assert _standing.differing_versions(saved) == []


def test_a_run_that_has_not_begun_has_nothing(tmp_path):
    assert _standing.found(config(), tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_other_versions_are_told(tmp_path):
    keep(tmp_path, 1)
    saved = _standing.found(config(), tmp_path)
    now = saved.details["versions"]["torch"]
    older = checkpoints.Checkpoint(saved.folder, 1, {"versions": {**saved.details["versions"], "torch": "1.0"}})
    assert _standing.differing_versions(older) == [f"torch 1.0 → {now}"]


def test_the_figures_end_where_the_checkpoint_does(tmp_path):
    for step in (1, 2):
        keep(tmp_path, step)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_text()
    # Killed between the checkpoint and its row.
    path.write_text(whole.splitlines(keepends=True)[0])
    _standing.found(config(), tmp_path)
    assert path.read_text() == whole
    # The newest checkpoint was taken away: its batch is made again.
    shutil.rmtree(tmp_path / "checkpoints" / "step-0002")
    assert _standing.found(config(), tmp_path).step == 1
    assert path.read_text() == whole.splitlines(keepends=True)[0]


def test_another_runs_checkpoint_is_not_gone_on_from(tmp_path):
    keep(tmp_path, 1, config(seed=1))
    with pytest.raises(UsageError, match="is the checkpoint of a run with seed 1, and this one's is 0"):
        _standing.found(config(), tmp_path)


def test_a_damaged_checkpoint_is_not_gone_on_from(tmp_path):
    keep(tmp_path, 1)
    (tmp_path / "checkpoints" / "step-0001" / "optimizer.pt").write_bytes(b"OPTIMIZER.")
    with pytest.raises(UsageError, match=r"step-0001/optimizer\.pt has .*; remove the folder to go on from the checkpoint before it"):
        _standing.found(config(), tmp_path)


def test_a_checkpoint_is_as_good_as_the_batch_that_its_policy_played(tmp_path):
    # Checkpoint 2 played batch 3, which went best.
    for step, success in [(1, 0.1), (2, 0.2), (3, 0.9), (4, 0.3), (5, 0.3), (6, 0.3)]:
        keep(tmp_path, step, success_rate=success)
    assert kept(tmp_path) == [2, 5, 6]
    assert _standing.scores(config(), tmp_path)[2] == 0.9


def test_retention_is_as_configured(tmp_path):
    settings = config(checkpoints={"keep_last": 1, "keep_best": 1, "metric": "turns", "goal": "min", "keep_every": 3})
    for step, turns in [(1, 4.0), (2, 2.0), (3, 4.0), (4, 4.0), (5, 4.0)]:
        keep(tmp_path, step, settings, turns=turns)
    assert kept(tmp_path) == [1, 3, 5]


def test_an_alarm_is_in_the_row(tmp_path):
    (alarm,) = keep(tmp_path, 1, kl_sampler=0.3)
    assert not alarm.stops
    (row,) = read_metrics(tmp_path)
    assert row["alarms"] == [alarm.to_dict()]
    assert _standing.found(config(), tmp_path).step == 1


def test_the_entropy_is_compared_with_the_first_batch_that_had_one(tmp_path):
    keep(tmp_path, 1, entropy=None)
    keep(tmp_path, 2, entropy=0.5)
    (alarm,) = keep(tmp_path, 3, entropy=0.04)
    assert (alarm.name, alarm.value) == ("entropy_share", pytest.approx(0.08))


def test_an_alarm_that_stops_keeps_the_checkpoints_before_it(tmp_path):
    settings = config(checkpoints={"keep_last": 1, "keep_best": 0})
    keep(tmp_path, 1, settings)
    keep(tmp_path, 2, settings)
    found = keep(tmp_path, 3, settings, not_finite=2, loss=math.nan, entropy=math.nan)
    assert [(alarm.name, alarm.stops) for alarm in found] == [("not_finite", True)]
    assert kept(tmp_path) == [2, 3]
    row = read_metrics(tmp_path)[-1]
    assert (row["loss"], row["entropy"]) == (None, None)
    with pytest.raises(
        RunStopped, match=r"^stopped after batch 3: not_finite: 2 of the batch's .*--resume --set alarms\.not_finite\.stop=null"
    ):
        _standing.raise_for_alarms(3, found)


def test_a_stopped_run_goes_on_when_the_limit_is_another(tmp_path):
    strict = config(alarms={"kl_sampler": {"stop": 0.2}})
    keep(tmp_path, 1, strict, kl_sampler=0.3)
    with pytest.raises(RunStopped, match=r"^stopped after batch 1: kl_sampler: the policy moved 0\.3 nats .* \(limit 0\.2\)"):
        _standing.found(strict, tmp_path)
    assert _standing.found(config(alarms={"kl_sampler": {"stop": 0.4}}), tmp_path).step == 1
    assert _standing.found(config(), tmp_path).step == 1
    # Or when the batch is made again.
    shutil.rmtree(tmp_path / "checkpoints" / "step-0001")
    assert _standing.found(strict, tmp_path) is None


def test_a_finished_run_is_not_stopped_any_more(tmp_path):
    strict = config(alarms={"kl_sampler": {"stop": 0.2}})
    keep(tmp_path, 1, strict, kl_sampler=0.3)
    outcome = dict.fromkeys(
        ("n", "successes", "low", "high", "mean_reward", "mean_turns", "invalid_calls", "truncated", "failures", "first_failure", "seconds"), 0
    )
    (tmp_path / "evaluations.json").write_text(json.dumps({"grpo": {"env_id": "", "agent": "", **outcome}}))
    assert _standing.found(strict, tmp_path).step == 1


def test_a_stopped_run_has_an_exit_code_of_its_own_and_one_line(monkeypatch, capsys):
    def stopped(*arguments, **options):
        raise RunStopped("stopped after batch 3: why")

    monkeypatch.setattr("art_gym.cli._launch.run", stopped)
    assert main(["train", "art_gym/Lookup-v0"]) == 3
    assert capsys.readouterr().err == "error: stopped after batch 3: why\n"
