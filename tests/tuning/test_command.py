"""The command `everlearn tune`."""

import pytest
import yaml

import everlearn
from everlearn.tuning import WorkerLost

pytest.importorskip("optuna")
pytest.importorskip("cyclopts")
from everlearn.cli.app import start


def test_command_continues_after_lost_study(tmp_path, monkeypatch, capsys):
    def fake_outcomes(runs, *options, **settings):
        return [(i, WorkerLost("gone") if "EWC" in str(run) else run.run(False)) for i, run in enumerate(runs)]

    monkeypatch.setattr("everlearn.cli.tune.outcomes", fake_outcomes)
    arguments = (
        "tune --methods ewc,l2 --scenario domain --first 2 --epochs 1 --hidden 8 --trials 1 --cluster ray --workers 2"
    )
    assert start([*arguments.split(), "--out", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "digits, domain-incremental, L2: averages" in captured.out and "EWC" not in captured.out
    assert "digits, domain-incremental, EWC: The processes of 1 of 1 trials were lost (gone)" in captured.err


def test_command_writes_best_config_that_runs(tmp_path, capsys):
    arguments = (
        "tune --methods ewc --fields ewc.strength=1:1e6 --scenario domain --first 2 --epochs 1 --hidden 20 --trials 2 "
        f"--out {tmp_path}"
    )
    assert start(arguments.split()) == 0
    folder = tmp_path / "digits-domain-ewc"
    output = capsys.readouterr().out
    assert "average accuracy" in output and "old tasks" in output
    assert (folder / "trade-off.png").read_bytes().startswith(b"\x89PNG")
    best = yaml.safe_load((folder / "best.yaml").read_text())
    assert best["methods"] == "ewc" and 1 <= best["set"]["ewc"]["strength"] <= 1e6 and "valid" not in best
    assert start(["run", str(folder / "best.yaml"), "--out", str(tmp_path / "runs")]) == 0
    (result,) = everlearn.results.load(tmp_path / "runs")
    assert result.config["training"]["split"] == "test" and result.accuracy.shape == (5, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("tune --methods joint", "no strength to tune"),
        ("tune --fields ewc.strength=1-9", "LOW:HIGH"),
        ("tune --fields ewc.strenght", "no field 'strenght'"),
        ("tune --fields strength", "METHOD.FIELD"),
        ("tune --methods ewc --fields si.strength", "not among the methods"),
        ("tune --cluster ray", "number of trials"),
        ("tune --track wandb", "not tracked"),
    ],
)
def test_command_refuses_invalid_arguments(arguments, message, capsys):
    assert start(arguments.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of ray
@pytest.mark.enable_socket
def test_ray_cluster_equals_one_process(tmp_path, capsys):
    ray = pytest.importorskip("ray")
    arguments = (
        "tune --methods ewc --scenario domain --first 2 --epochs 1 --hidden 16 --threads 1 --trials 3 --no-prune"
    )
    assert start([*arguments.split(), "--out", str(tmp_path / "local")]) == 0
    try:
        assert start([*arguments.split(), "--cluster", "ray", "--workers", "3", "--out", str(tmp_path / "remote")]) == 0
    finally:
        ray.shutdown()
    local, remote = (
        everlearn.results.load(tmp_path / name / "digits-domain-ewc" / "trials") for name in ("local", "remote")
    )
    assert [result.config for result in local] == [result.config for result in remote] and len(local) == 3
    assert all((a.accuracy == b.accuracy).all() for a, b in zip(local, remote, strict=True))
