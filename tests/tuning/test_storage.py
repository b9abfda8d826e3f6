"""The file of a study: locks, damage and mismatched studies."""

import pytest

from everlearn import EWC
from everlearn.runtime import files
from everlearn.trainer.settings import Training
from everlearn.tuning import tune
from everlearn.tuning.trials import TrialRun
from tests.tuning.studies import TRAINING, digits, make_net


@pytest.mark.parametrize("name", ["a?b", "a%3Fb {c}#d"])
def test_folder_name_may_contain_special_characters(name, tmp_path, monkeypatch):
    monkeypatch.setattr(TrialRun, "run", lambda *_: {"old": 0.5, "new": 0.5, "score": 0.5})
    for trials in (1, 2):
        study = tune(make_net, EWC(), digits(), trials=trials, training=TRAINING, out=tmp_path / name)
        assert len(study.trials) == trials
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name / "study.db").read_bytes().startswith(b"SQLite format 3")


def test_concurrent_study_is_refused(tmp_path):
    with files.exclusive_lock(tmp_path / "study.lock"), pytest.raises(ValueError, match="Another process"):
        tune(make_net, EWC(), digits(), trials=1, training=TRAINING, out=tmp_path)


def test_mismatched_damaged_and_foreign_studies_are_refused(tmp_path):
    tune(make_net, EWC(), digits(), trials=1, training=TRAINING, out=tmp_path)
    mismatches = [
        {"training": Training(epochs=1)},
        {"training": TRAINING, "fields": {"strength": (5, 50)}},
        {"training": TRAINING, "fields": {"mode": None}},
    ]
    for mismatch in mismatches:
        with pytest.raises(ValueError, match="other data, settings or fields"):
            tune(make_net, EWC(), digits(), trials=1, out=tmp_path, **mismatch)
    # The default value of a tuned field may differ.
    tune(make_net, EWC(strength=3.0), digits(), trials=1, training=TRAINING, out=tmp_path)
    with pytest.raises(ValueError, match="other data, settings or fields"):
        tune(make_net, EWC(prior=0.1), digits(), trials=1, training=TRAINING, out=tmp_path)
    (tmp_path / "study.db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(ValueError, match="is damaged"):
        tune(make_net, EWC(), digits(), trials=1, training=TRAINING, out=tmp_path)
    assert (tmp_path / "study.db").read_bytes().startswith(b"not a database"), "the file is unchanged"
    optuna = pytest.importorskip("optuna")
    foreign = optuna.create_study(
        storage=f"sqlite:///{tmp_path}/foreign/study.db".replace("/foreign/", "/foreign-"), study_name="everlearn"
    )
    foreign.add_trial(optuna.create_trial(value=0.1))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign-study.db").rename(tmp_path / "foreign" / "study.db")
    with pytest.raises(ValueError, match="everlearn has not created"):
        tune(make_net, EWC(), digits(), trials=1, training=TRAINING, out=tmp_path / "foreign")


def test_damage_during_study_is_reported(tmp_path):
    def damage(*facts):
        (tmp_path / "study.db").write_bytes(b"full" * 1000)

    with pytest.raises(ValueError, match=r"is damaged, or its disk is full \(.*: free disk space"):
        tune(make_net, EWC(), digits(), trials=2, training=TRAINING, out=tmp_path, on_trial=damage)
