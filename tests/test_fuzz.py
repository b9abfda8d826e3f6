"""Truncated, corrupted and foreign files raise an error that names them, and lose no data."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import everlearn
from everlearn import ER, METHODS, nets, results, sources, streams, updating
from everlearn.integrations.huggingface import load as load_method
from everlearn.integrations.huggingface import save as save_method

FOREIGN_FILES = [
    b"",
    b"\x00" * 64,
    b"PK\x03\x04 not a zip",
    b"{}",
    b"[1, 2",
    b"null",
    "ünicode".encode("utf-16"),
    b"\x80\x04N.",
]
HANDLED_ERRORS = (ValueError, OSError, TypeError)  # the command line prints their messages


def corrupted_copies(content, count=40):
    """Yield truncated copies, copies with a flipped bit or repeated bytes, and foreign files."""
    rng = random.Random(0)
    for _ in range(count):
        position = rng.randrange(len(content))
        yield content[:position]
        yield content[:position] + bytes([content[position] ^ (1 << rng.randrange(8))]) + content[position + 1 :]
        yield content[:position] + content[position : position + 16] + content[position:]
    yield from FOREIGN_FILES


def check_reading(path, read, count=40):
    """Check that reading corrupted copies works or raises a handled error, and does not change the file."""
    content = path.read_bytes()
    error_count = 0
    for corrupted in corrupted_copies(content, count):
        path.write_bytes(corrupted)
        try:
            read()
        except HANDLED_ERRORS as error:
            error_count += 1
            assert str(error).strip() and "\n\n" not in str(error).strip(), repr(error)
        assert path.read_bytes() == corrupted
    path.write_bytes(content)
    read()
    assert error_count >= len(FOREIGN_FILES) - 2, "foreign files must be refused"


def make_arrays():
    generator = torch.Generator().manual_seed(0)
    return torch.rand(30, 3, generator=generator).numpy(), np.arange(30) % 3


@pytest.mark.filterwarnings("ignore")  # numpy warns about values with flipped bits
def test_corrupted_npz_files(tmp_path):
    x, y = make_arrays()
    np.savez(tmp_path / "data.npz", x=x, y=y)
    check_reading(tmp_path / "data.npz", lambda: sources.npz(tmp_path / "data.npz"))


@pytest.mark.filterwarnings("ignore")
def test_corrupted_tables(tmp_path):
    x, y = make_arrays()
    lines = ["a,b,c,y"]
    for features, label in zip(x, y, strict=True):
        lines.append(",".join(map(str, [*features, label])))
    (tmp_path / "data.csv").write_text("\n".join(lines))
    check_reading(tmp_path / "data.csv", lambda: sources.table(tmp_path / "data.csv", target="y"))
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    parquet.write_table(arrow.table({"a": x[:, 0], "y": y}), tmp_path / "data.parquet")
    check_reading(tmp_path / "data.parquet", lambda: sources.table(tmp_path / "data.parquet", target="y"))


def test_corrupted_results(tmp_path):
    stream = streams.digits(scenario="class").first(2)
    path = everlearn.run(nets.mlp, METHODS["finetune"](), stream, iterations=1).save(tmp_path)
    check_reading(path, lambda: results.load(tmp_path))


@pytest.mark.filterwarnings("ignore:A result")
@pytest.mark.filterwarnings("ignore:.* is damaged or not a result")
def test_a_corrupted_result_is_repeated_and_replaced(tmp_path):
    stream = streams.digits(scenario="class").first(2)
    path = everlearn.run(nets.mlp, METHODS["finetune"](), stream, iterations=1).save(tmp_path)
    expected_shape = results.Result.load(path).accuracy.shape
    for corrupted in corrupted_copies(path.read_bytes(), 1):
        path.write_bytes(corrupted)
        result = everlearn.run(nets.mlp, METHODS["finetune"](), stream, iterations=1, out=tmp_path)
        assert result.accuracy.shape == expected_shape


def test_corrupted_configurations(tmp_path, capsys):
    pytest.importorskip("cyclopts")
    from everlearn.cli.app import start

    path = tmp_path / "plan.yaml"
    path.write_text(
        "stream: digits\nmethods: [ewc, er]\nset:\n  ewc: {strength: 30}\nseeds: 2\nlr: 0.01\nhidden: 400,400\n"
    )
    content = path.read_bytes()
    for corrupted in corrupted_copies(content, 12):
        path.write_bytes(corrupted)
        exit_code = start(["run", str(path), "--dry-run"])
        captured = capsys.readouterr()
        assert exit_code == 0 or (exit_code == 2 and captured.err.startswith("everlearn: ")), captured.err


@pytest.mark.filterwarnings("ignore")
def test_corrupted_method_states(tmp_path):
    method = ER(5)
    method.observe(everlearn.Batch(torch.rand(4, 3), torch.arange(4)), torch.rand(4, 4))
    path = save_method(method, tmp_path)
    check_reading(path, lambda: load_method(ER(5), tmp_path), 60)


def test_corrupted_deployed_weights_and_state(tmp_path):
    def make():
        torch.manual_seed(0)
        return torch.nn.Linear(3, 3)

    x, y = make_arrays()
    np.savez(tmp_path / "data.npz", x=x, y=y)
    weights = tmp_path / "model.safetensors"
    state = tmp_path / "state"
    save_file(make().state_dict(), weights)
    check_reading(weights, lambda: updating.load(make, weights), 20)
    everlearn.update(make, weights, state, tmp_path / "data.npz", ER(10), tolerance=100.0)
    np.savez(tmp_path / "more.npz", x=x + 1, y=y)
    backup = tmp_path.parent / f"{tmp_path.name} backup"
    shutil.copytree(tmp_path, backup)
    files = [p for p in state.rglob("*") if p.is_file() and p.suffix in (".json", ".pt", ".safetensors")]
    for path in sorted(p.relative_to(state) for p in files):
        for corrupted in [*corrupted_copies((state / path).read_bytes(), 1)][:6]:
            (state / path).write_bytes(corrupted)
            initial_weights = weights.read_bytes()
            try:
                everlearn.update(make, weights, state, tmp_path / "more.npz", ER(10), tolerance=100.0, dry_run=True)
            except HANDLED_ERRORS as error:
                assert str(error).strip(), path
            assert weights.read_bytes() == initial_weights, path
            shutil.rmtree(state)
            shutil.copytree(backup / "state", state)


@pytest.mark.parametrize("name", ["T1", "T5"])
def test_corrupted_recorded_results(name, tmp_path):
    pytest.importorskip("cyclopts")
    from everlearn.experiments.reproduce import page

    source = Path(__file__).parents[1] / "docs" / "results" / f"{name}.json"
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / f"{name}.json").write_text(json.dumps(json.loads(source.read_text())))
    check_reading(folder / f"{name}.json", lambda: page(folder), 5)
