"""Tables, arrays and images as data of an update."""

import json
from pathlib import Path

import pytest
import torch

import everlearn
from everlearn import Method
from everlearn.sources import Data
from everlearn.updating import Reading, load
from tests.updating.deployments import QUICK, SHUFFLED, digits, make_model, read_files, run_update, write_csv, write_npz


def test_columns_in_two_orders_are_refused(deployment):
    """Otherwise accuracy before the update would be measured on shuffled inputs, and forgetting would be hidden."""
    write_csv(deployment / "old.csv", digits(0, 1, 2, 3))
    write_csv(deployment / "new.csv", digits(0, 1, 2, 3, shift=1), order=SHUFFLED)
    files_before = read_files(deployment)
    with pytest.raises(ValueError, match="have the same columns in another order") as error:
        run_update("new.csv", old="old.csv", read=Reading(y="kind"))
    assert f"column 1 of the inputs is 'p{SHUFFLED[0]}' in the first and 'p0' in the second" in str(error.value)
    assert "--x" in str(error.value) and len(str(error.value)) < 500 and read_files(deployment) == files_before
    order = tuple(f"p{i}" for i in range(64))
    outcome = run_update("new.csv", old="old.csv", read=Reading(x=order, y="kind"))
    assert outcome.before[0] > 0.9, "columns are in the order of training"
    model = load(make_model, "model.safetensors")
    assert everlearn.evaluate(model, Method(), digits(0, 1, 2, 3)[1])[0] > 0.8


def test_different_columns_are_refused_in_short_message(deployment):
    write_csv(deployment / "old.csv", digits(0, 1, 2, 3))
    text = (deployment / "old.csv").read_text().splitlines()
    (deployment / "new.csv").write_text("\n".join([f"{text[0]},day", *(f"{line},3" for line in text[1:])]))
    with pytest.raises(ValueError, match=r"have different columns: only new\.csv has 'day'; name those"):
        run_update("new.csv", old="old.csv", read=Reading(y="kind"))
    (deployment / "few.csv").write_text("kind,a,b\n0,1,2\n1,2,3\n" * 5)
    run_update("old.csv", read=Reading(y="kind"))
    with pytest.raises(ValueError, match=r"'p0', 'p1', 'p2', 'p3', 'p4', … \(64 in all\); it has kind, a, b") as error:
        run_update("few.csv")
    assert len(str(error.value)) < 300


def test_column_order_is_read_from_state(deployment):
    write_csv(deployment / "a.csv", digits(0, 1, 2, 3, shift=1))
    write_csv(deployment / "b.csv", digits(0, 1, 2, 3), order=SHUFFLED)
    run_update("a.csv", read=Reading(y="kind"), training=QUICK)
    by_state = run_update("b.csv", dry_run=True)
    shuffled_names = tuple(f"p{i}" for i in SHUFFLED)
    by_name = run_update("b.csv", read=Reading(x=shuffled_names), dry_run=True)
    assert torch.equal(by_state.held_out_sets[-1].x, by_name.held_out_sets[-1].x) and by_state.before[2] > 0.9
    table = everlearn.sources.table("b.csv", target="kind")
    assert table.features == list(shuffled_names)
    assert torch.equal(run_update(table, dry_run=True).held_out_sets[-1].x, by_state.held_out_sets[-1].x), (
        "also for a table in memory"
    )
    with pytest.raises(ValueError, match="the inputs of the model are 64 columns since its first table") as error:
        run_update("b.csv", read=Reading(x=("p0", "p1")))
    assert len(str(error.value)) < 500
    write_npz(deployment / "c.npz", Data(*((x.flatten(1), y) for x, y in digits(0, 1, shift=2))))
    run_update("c.npz", read=Reading(x=("x",), y="y"), training=QUICK)
    assert run_update("b.csv", read=Reading(y="kind"), training=QUICK).before[3] > 0.9, (
        "also after data without column names"
    )


def test_parquet_and_images(deployment):
    table = pytest.importorskip("pyarrow").table
    parquet = pytest.importorskip("pyarrow.parquet")
    (x, y), _ = digits(0, 1)
    parquet.write_table(
        table({**{f"p{i}": x.flatten(1)[:, i].numpy() for i in range(64)}, "y": y.numpy()}), "new.parquet"
    )
    assert run_update("new.parquet").before[1] > 0.8
    image = pytest.importorskip("PIL.Image")
    for i, (pixels, label) in enumerate(zip(x[:40], y[:40].tolist(), strict=True)):
        Path(f"images/{label}").mkdir(parents=True, exist_ok=True)
        image.fromarray((pixels[0] * 255).byte().numpy()).save(f"images/{label}/{i}.png")
    with pytest.raises(ValueError, match="are words"):
        run_update("images", read=Reading(size=8, grey=True))
    run_update("images", read=Reading(size=8, grey=True), state="other", accept_weights=True, classes=["0", "1"])
    assert json.loads(Path("other/update-0001/facts.json").read_text())["reading"]["size"] == 8
