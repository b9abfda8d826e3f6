"""Rows that are forgotten: the model equals one that never saw them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from everlearn import ER, EWC, KLDA, NearestMean, RanPAC, StreamingLDA
from everlearn.sources import Data
from everlearn.updating import Reading, class_names, forget, load
from everlearn.updating.held_out_sets import example_digests
from tests.updating.deployments import (
    NAMES,
    Killed,
    current_version,
    digits,
    kill_at_write,
    make_model,
    read_files,
    run_update,
    weights_equal,
    with_class_names,
)

HEADS = {
    "nearest-mean": NearestMean(),
    "streaming-lda": StreamingLDA(),
    "ranpac": RanPAC(200),
    "recursive": RanPAC(200, ridge=1.0, recursive=True),
    "klda": KLDA(200),
}


def forget_rows(rows, **options):
    return forget(make_model, "model.safetensors", options.pop("state", "state"), rows, **options)


def without(data, rows):
    """Return data without some training rows."""
    (x, y), test = data
    is_kept = torch.ones(len(y), dtype=torch.bool)
    is_kept[rows] = False
    return Data((x[is_kept], y[is_kept]), test)


def select(data, rows):
    (x, y), _ = data
    return x[rows], y[rows]


@pytest.fixture
def updated(deployment):
    """Deployed model with two updates of RanPAC."""
    run_update(digits(4, 5), RanPAC(100), old=digits(0, 1, 2, 3))
    run_update(digits(6, 7), RanPAC(100))
    return deployment


@pytest.mark.parametrize("method", HEADS.values(), ids=HEADS.keys())
def test_model_equals_one_that_never_saw_the_rows(method, deployment):
    initial_weights = Path("model.safetensors").read_bytes()
    old, first, second = digits(0, 1, 2, 3), digits(4, 5), digits(6, 7)
    forgotten = [torch.arange(5, 25), torch.arange(0, 160, 2), torch.tensor([3])]
    run_update(first, method, old=old)
    run_update(second, method)
    rows = [select(data, index) for data, index in zip((old, first, second), forgotten, strict=True)]
    outcome = forget_rows(tuple(torch.cat(parts) for parts in zip(*rows, strict=True)))
    assert outcome.number == current_version() == 3 and outcome.forgotten == 101
    ours = load(make_model, "model.safetensors")

    Path("model.safetensors").write_bytes(initial_weights)
    remaining = [without(data, index) for data, index in zip((old, first, second), forgotten, strict=True)]
    run_update(remaining[1], method, old=remaining[0], state="other")
    run_update(remaining[2], method, state="other")
    never_saw = load(make_model, "model.safetensors")
    x = torch.cat([data[1][0] for data in (old, first, second)])
    with torch.no_grad():
        torch.testing.assert_close(ours(x), never_saw(x), rtol=1e-4, atol=1e-4)
    states = [torch.load(f"{path}/method.pt") for path in ("state/update-0003", "other/update-0002")]
    for key, value in states[1]["statistics"].items():
        torch.testing.assert_close(states[0]["statistics"][key], value, rtol=1e-8, atol=1e-8)


def test_forgotten_rows_can_be_learned_again(updated):
    reference = load(make_model, "model.safetensors")
    data = digits(6, 7)
    forget_rows(data)
    assert not run_update(digits(4, 5), RanPAC(100)).new, "other data are still known"
    learned = run_update(data, RanPAC(100))
    assert learned.new and learned.number == 4 and [held_out.number for held_out in learned.held_out_sets] == [0, 1, 4]
    x = data[1][0]
    with torch.no_grad():
        torch.testing.assert_close(load(make_model, "model.safetensors")(x), reference(x), rtol=1e-4, atol=1e-4)


def test_rows_learned_several_times_are_subtracted_as_often(updated):
    run_update(digits(4, 5), RanPAC(100), repeat=True)
    rows = select(digits(4, 5), torch.arange(7))
    doubled_rows = tuple(torch.cat([values, values]) for values in rows)
    outcome = forget_rows(doubled_rows)
    assert outcome.forgotten == 7 and "14 learned examples were subtracted" in str(outcome)
    with pytest.raises(ValueError, match="7 of the 7 rows to forget are not among those that updates have learned, or"):
        forget_rows(rows)


def test_held_out_rows_are_deleted(updated):
    old = digits(0, 1, 2, 3)
    x_test, y_test = old[1]
    before = torch.load("state/update-0002/method.pt")["statistics"]["counts"]
    outcome = forget_rows((x_test[:20], y_test[:20]))
    assert "0 learned examples were subtracted, and 20 were deleted from held-out sets" in str(outcome)
    assert len(outcome.held_out_sets[0]) == len(y_test) - 20
    stored = json.loads(Path("state/update-0003/facts.json").read_text())["held_out_sets"]
    assert stored[0]["examples"] == len(y_test) - 20
    assert torch.equal(torch.load("state/update-0003/method.pt")["statistics"]["counts"], before)
    outcome = forget_rows((x_test[20:], y_test[20:]))
    assert [held_out.number for held_out in outcome.held_out_sets] == [1, 2], "an empty set is dropped"
    assert run_update(digits(0, 8), RanPAC(100)).accepted


def test_held_out_rows_that_are_not_stored_are_known(deployment):
    data = digits(0, 1, 2, 3)
    pair = tuple(torch.cat(parts) for parts in zip(*data, strict=True))
    run_update(pair, RanPAC(100), keep=5)
    outcome = forget_rows((pair[0][10:], pair[1][10:]))
    assert outcome.forgotten == len(pair[1]) - 10


def test_unknown_rows_are_refused_and_change_nothing(updated):
    files_before = read_files(updated)
    (x, y), _ = digits(4, 5)
    for rows, message in [
        ((x[:5] + 0.01, y[:5]), "5 of the 5 rows to forget are not among those that updates have learned"),
        ((torch.cat([x[:5], x[:2] + 1]), y[[0, 1, 2, 3, 4, 0, 1]]), "2 of the 7 rows"),
        ((x[:5], 9 - y[:5]), "some were learned with another label"),
        ((x[:5], y[:5] + 50), "the first has the label 54"),
        ((x[:0], y[:0]), "There are no rows to forget"),
        (digits(0, 1, 2, 3, 4, 5, 6, 7, shift=1), "not among"),
        ((torch.full_like(x[:2], torch.nan), y[:2]), "NaN"),
    ]:
        with pytest.raises((ValueError, TypeError), match=message):
            forget_rows(rows)
        assert read_files(updated) == files_before


def test_all_learned_rows_cannot_be_forgotten(deployment):
    run_update(digits(0, 1, 2, 3), RanPAC(100))
    files_before = read_files(deployment)
    with pytest.raises(ValueError, match="none would be left"):
        forget_rows(digits(0, 1, 2, 3))
    assert read_files(deployment) == files_before


def test_a_class_without_examples_is_never_predicted(deployment):
    named = [with_class_names(data, True) for data in (digits(0, 1, 2, 3), digits(4, 5))]
    run_update(named[1], StreamingLDA(), old=named[0], classes=NAMES[:4])
    (x, y), test = digits(4, 5)
    labels = np.array(NAMES)[y[y == 5].numpy()]
    outcome = forget_rows((x[y == 5], labels))
    assert "Classes without examples now: five. They are never predicted" in str(outcome)
    five, four = (class_names("model.safetensors").index(name) for name in ("five", "four"))
    predicted = load(make_model, "model.safetensors")(torch.cat([test[0], digits(0, 1, 2, 3)[1][0]])).argmax(1)
    assert five not in predicted and four in predicted
    run_update(with_class_names(digits(5, shift=1), True), StreamingLDA())
    assert five in load(make_model, "model.safetensors")(digits(5, shift=1)[1][0]).argmax(1)


def test_report_says_what_is_not_forgotten(updated):
    rows = select(digits(4, 5), torch.arange(3))
    dry_outcome = forget_rows(rows, dry_run=True)
    assert current_version() == 2 and "Dry run: nothing is written." in str(dry_outcome)
    outcome = forget_rows(rows)
    report = str(outcome)
    assert report.startswith("Update 3 with RanPAC(dimension=100): forgot 3 rows.")
    assert "Not forgotten: what the features of the model have learned" in report
    assert "Other versions in the state folder still contain the rows: with versions=1" in report
    assert "are allowed" not in report and Path("state/update-0003/report.txt").read_text() == f"{report}\n"
    assert len(list(Path("state").glob("update-*"))) == 4
    repeated = forget_rows(rows, versions=1)
    assert not repeated.new and "were forgotten in update 3: there is nothing to do" in str(repeated)
    assert [path.name for path in Path("state").glob("update-*")] == ["update-0003"]
    outcome = forget_rows(select(digits(6, 7), torch.arange(3)), versions=1)
    assert "All other versions in the state folder are deleted" in str(outcome)
    assert [path.name for path in Path("state").glob("update-*")] == ["update-0004"]


def test_no_trace_of_the_rows_is_left(updated):
    """Neither inputs nor digests of the rows are in any file of the only version."""
    rows = tuple(torch.cat([values, held_out]) for values, held_out in zip(*digits(4, 5), strict=True))
    digests = example_digests(rows[0])
    contents = b"".join(read_files("state").values())
    assert all(digest in contents for digest in digests[:160]) and rows[0][-1].numpy().tobytes() in contents
    forget_rows(rows, versions=1)
    contents = b"".join(read_files("state").values())
    assert not any(digest in contents for digest in digests)
    assert not any(row.numpy().tobytes() in contents for row in rows[0])


@pytest.mark.parametrize("method", [ER(50), EWC(), ER(50) + EWC()], ids=["er", "ewc", "er+ewc"])
def test_other_methods_cannot_forget(method, deployment):
    run_update(digits(0, 1), method)
    files_before = read_files(deployment)
    with pytest.raises(ValueError, match="cannot forget rows: what it has learned of them is spread over all weights"):
        forget_rows(digits(0, 1))
    assert read_files(deployment) == files_before


def test_a_folder_without_updates_is_refused(deployment):
    with pytest.raises(ValueError, match="There is no update in state, so nothing can be forgotten"):
        forget_rows(digits(0, 1))
    assert not Path("state").exists()


def test_without_stored_digests_rows_are_not_checked(deployment):
    run_update(digits(0, 1, 2, 3), RanPAC(100), keep=0)
    assert not list(Path("state").rglob("rows-*")) and not list(Path("state").rglob("learned-*"))
    rows = select(digits(0, 1, 2, 3), torch.arange(10))
    outcome = forget_rows(rows)
    assert "Warning: 10 rows could not be checked, because updates with keep=0 record none" in str(outcome)
    counts = torch.load("state/update-0002/method.pt")["statistics"]["counts"]
    assert counts.sum() == 150


def test_killed_before_every_write(updated, monkeypatch):
    rows = select(digits(4, 5), torch.arange(10))
    old_weights = Path("model.safetensors").read_bytes()
    shutil.copytree("state", "reference")
    with monkeypatch.context() as patch:
        all_writes = kill_at_write(patch, index=-1)
        forget_rows(rows, state="reference", versions=1)
    assert all_writes.count("current.json") == 2 and all_writes.count("model.safetensors") == 2
    for index in range(len(all_writes)):
        state = f"state-{index}"
        shutil.copytree("state", state)
        Path("model.safetensors").write_bytes(old_weights)
        with monkeypatch.context() as patch:
            written = kill_at_write(patch, index)
            with pytest.raises(Killed):
                forget_rows(rows, state=state, versions=1)
        is_committed = "current.json" in written
        assert current_version(state) == (3 if is_committed else 2)
        repeated = forget_rows(rows, state=state, versions=1)
        assert repeated.new != is_committed and repeated.number == 3
        assert weights_equal("model.safetensors", "reference/update-0003/model.safetensors")
        assert [path.name for path in Path(state).glob("update-*")] == ["update-0003"]
        assert run_update(digits(0, 8), RanPAC(100), state=state, dry_run=True).number == 4


def test_roll_back_brings_the_rows_back(updated):
    rows = select(digits(4, 5), torch.arange(10))
    forget_rows(rows)
    shutil.copy("state/update-0002/model.safetensors", "model.safetensors")
    with pytest.raises(ValueError, match="it was changed"):
        forget_rows(rows)
    outcome = forget_rows(rows, accept_weights=True)
    assert outcome.new and outcome.number == 4 and "continues from update 2" in str(outcome)
    assert weights_equal("state/update-0003/model.safetensors", "state/update-0004/model.safetensors")


def test_tables_are_read_by_column(deployment):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (x, y), _ = digits(0, 1, 2, 3)
    columns = {f"p{i}": x.flatten(1)[:, i].numpy() for i in range(64)}
    table = pyarrow.table({**columns, "label": np.array(NAMES)[y.numpy()]})
    parquet.write_table(table, "data.parquet")
    run_update("data.parquet", RanPAC(100), classes=NAMES[:4], read=Reading(y="label"))
    parquet.write_table(table.slice(0, 1).select(table.column_names[::-1]), "rows.parquet")
    outcome = forget_rows("rows.parquet")
    assert outcome.forgotten == 1 and "1 learned examples were subtracted" in str(outcome)


def test_method_of_caller_is_not_changed(updated):
    method = RanPAC(100)
    forget_rows(select(digits(4, 5), torch.arange(3)), method=method)
    assert not method.statistics
    with pytest.raises(ValueError, match=r"The statistics are those of RanPAC\(dimension=100\)"):
        forget_rows(select(digits(4, 5), torch.arange(5, 9)), method=replace(method, dimension=50))
