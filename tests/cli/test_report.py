"""A run's report, from the files in its folder."""

import io
import json

import pytest
from rich.console import Console

from art_gym.cli import report
from art_gym.cli.config import RunConfig
from art_gym.cli.report import before_after_table, read_evaluations, read_metrics, verdict, write_report
from art_gym.errors import UsageError
from art_gym.evaluation import Evaluation


def outcome(successes: int, low: float, high: float, **kwargs) -> Evaluation:
    values = {"mean_reward": 0.5, "mean_turns": 3.0, "invalid_calls": 7, "seconds": 30.0} | kwargs
    return Evaluation(env_id="art_gym/Lookup-v0", agent="a", n=200, successes=successes, low=low, high=high, **values)


STAGES = {
    "untrained": outcome(0, 0.0, 0.0188),
    "warm_start": outcome(40, 0.1504, 0.2608),
    "grpo": outcome(130, 0.5817, 0.7126, failures={"policy": 2}),
}


@pytest.fixture
def folder(tmp_path):
    RunConfig.from_values({"env": {"id": "art_gym/Lookup-v0", "kwargs": {"size": 24}}, "seed": 3}).save(tmp_path / "config.yaml")
    rows = [
        {
            "step": 1,
            "phase": "grpo",
            "reward": 0.3,
            "success_rate": 0.2,
            "logprob_difference": 0.0031,
            "seconds_rollout": 15.0,
            "seconds_train": 40.0,
        },
        {
            "step": 2,
            "phase": "grpo",
            "reward": 0.4,
            "success_rate": 0.3,
            "logprob_difference": 0.0125,
            "seconds_rollout": 16.0,
            "seconds_train": 50.0,
        },
        {
            "step": 3,
            "phase": "grpo",
            "reward": 0.5,
            "success_rate": 0.4,
            "logprob_difference": 0.0094,
            "seconds_rollout": 17.0,
            "seconds_train": 60.0,
        },
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "evaluations.json").write_text(json.dumps({key: value.to_dict() for key, value in STAGES.items()}))
    return tmp_path


@pytest.fixture
def undrawn(monkeypatch):
    """An empty file instead of the curve: drawing it takes longer than all the rest."""
    monkeypatch.setattr(report, "_draw", lambda path, steps, evaluations: path.touch())


def test_evaluations_are_read_back_equal(folder):
    assert read_evaluations(folder) == STAGES


@pytest.mark.usefixtures("undrawn")
def test_the_report_has_the_before_and_after_table(folder):
    text = write_report(folder).read_text()
    assert "| untrained model | 0.0% | 0.0% to 1.9% | 200 |" in text
    assert "| after warm start | 20.0% | 15.0% to 26.1% | 200 |" in text
    assert "| after GRPO | 65.0% | 58.2% to 71.3% | 200 | 0.500 | 3.0 | 7 | 2 |" in text
    assert "smollm2-135m on art_gym/Lookup-v0 (size=24), seed 3" in text


@pytest.mark.usefixtures("undrawn")
def test_the_report_tells_how_the_logprob_difference_grew(folder):
    text = write_report(folder).read_text()
    assert "0.0031 at step 1, 0.0094 at step 3, largest 0.0125 at step 2" in text


@pytest.mark.usefixtures("undrawn")
def test_the_report_tells_of_alarms(folder):
    assert "## Alarms" not in write_report(folder).read_text()
    rows = [json.loads(line) | {"alarms": []} for line in (folder / "metrics.jsonl").read_text().splitlines()]

    def told() -> str:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return write_report(folder).read_text().partition("## Alarms\n\n")[2].partition("\n\n")[0]

    assert told() == "None."
    rows[0]["alarms"] = [{"name": "kl_sampler", "stops": False, "message": "kl_sampler: 0.1"}]
    rows[2]["alarms"] = [
        {"name": "kl_sampler", "stops": False, "message": "kl_sampler: 0.2"},
        {"name": "entropy", "stops": True, "message": "entropy: low"},
    ]
    assert told() == "- Batches 1, 3. kl_sampler: 0.2\n- Batch 3; it stopped the run after batch 3. entropy: low"


@pytest.mark.usefixtures("undrawn")
def test_the_report_adds_up_the_seconds(folder):
    text = write_report(folder).read_text()
    # 15 + 16 + 17 = 48 s; 40 + 50 + 60 = 150 s; three evaluations of 30 s.
    assert "| rollouts | 0:48 |" in text
    assert "| training | 2:30 |" in text
    assert "| evaluation | 1:30 |" in text


@pytest.mark.slow
def test_the_curve_is_a_picture_and_nothing_else_is_left(folder):
    write_report(folder)
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "curve.png", "evaluations.json", "metrics.jsonl", "report.md"]


def test_a_run_that_has_only_begun_has_a_report_too(folder):
    (folder / "metrics.jsonl").unlink()
    (folder / "evaluations.json").unlink()
    text = write_report(folder).read_text()
    assert "None yet." in text
    assert not (folder / "curve.png").exists()


@pytest.mark.slow
def test_one_step_without_evaluations_draws_a_curve(folder):
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    (folder / "evaluations.json").unlink()
    write_report(folder)
    assert (folder / "curve.png").exists()


def test_a_torn_last_line_is_left_out(folder):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    assert [row["step"] for row in read_metrics(folder)] == [1, 2, 3]


def test_a_broken_line_in_the_middle_is_an_error(folder):
    (folder / "metrics.jsonl").write_text('{"step"\n{"step": 2}\n')
    with pytest.raises(UsageError, match=r"metrics\.jsonl is damaged: line 1 isn't JSON"):
        read_metrics(folder)


@pytest.mark.parametrize("content", ["{", "[]", '{"grpo": {}}', '{"grpo": 3}'])
def test_broken_evaluations_are_told(folder, content):
    (folder / "evaluations.json").write_text(content)
    with pytest.raises(UsageError, match=r"evaluations\.json is damaged"):
        read_evaluations(folder)


UNMEASURED = dict.fromkeys(("entropy", "kl_sampler", "clip_fraction", "logprob_difference", "loss", "gradient_norm"))


@pytest.mark.usefixtures("undrawn")
def test_a_batch_without_a_gradient_has_dashes_and_no_part_in_the_comparison(folder):
    rows = [json.loads(line) | {"entropy": 1.5} for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[0] |= UNMEASURED
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = write_report(folder).read_text()
    assert "| 1 | 0.300 | 20.0% | – | – | – | – | 15 | 40 |" in text
    assert "0.0125 at step 2, 0.0094 at step 3, largest 0.0125 at step 2" in text


@pytest.mark.usefixtures("undrawn")
def test_a_run_in_which_no_batch_had_a_gradient_has_a_report(folder):
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": 0.0, "success_rate": 0.0} | UNMEASURED) + "\n")
    text = write_report(folder).read_text()
    assert "Sampler against trainer" not in text
    assert (folder / "curve.png").exists()


def test_a_folder_without_a_run_has_no_report(tmp_path):
    with pytest.raises(UsageError, match=r"can't read .*config\.yaml"):
        write_report(tmp_path)


def test_the_verdict_compares_the_intervals():
    assert verdict(STAGES) == "GRPO's whole interval lies above that of the policy it began with (after warm start): 58.2% > 26.1%."
    worse = {**STAGES, "grpo": outcome(50, 0.1950, 0.3144)}
    assert verdict(worse) == "GRPO's interval does not lie above that of the policy it began with (after warm start): 19.5% ≤ 26.1%."
    without = {"untrained": STAGES["untrained"], "grpo": STAGES["grpo"]}
    assert "(untrained model): 58.2% > 1.9%" in verdict(without)
    assert verdict({"untrained": STAGES["untrained"]}) == ""


def test_the_table_on_the_screen_keeps_the_order_of_the_run():
    console = Console(file=io.StringIO(), width=120)
    console.print(before_after_table({**STAGES, "grpo@5": outcome(80, 0.3346, 0.4693)}))
    text = console.file.getvalue()
    assert text.index("untrained model") < text.index("after warm start") < text.index("grpo@5") < text.index("after GRPO")
    assert "33.5% to 46.9%" in text


def test_the_table_fits_a_screen_of_80_columns():
    widest = outcome(200, 0.9812, 1.0, mean_reward=-0.125, mean_turns=10.0, invalid_calls=12345, failures={"policy": 200})
    console = Console(file=io.StringIO(), width=80)
    console.print(before_after_table({**STAGES, "warm_start": widest}))
    text = console.file.getvalue()
    assert "…" not in text
    assert "200 held-out scenarios" in text
    headings = ("policy", "success", "95% interval", "reward", "turns", "invalid", "failed")
    assert all(heading in text for heading in headings)
    row = next(line for line in text.splitlines() if "after warm start" in line)
    assert row.split() == ["after", "warm", "start", "100.0%", "98.1%", "to", "100.0%", "-0.125", "10.0", "12345", "200"]
