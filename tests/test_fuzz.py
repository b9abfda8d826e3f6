"""Files that were cut off, have a bit turned or are something else: a sentence that names them, and nothing lost."""

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

FOREIGN = [
    b"",
    b"\x00" * 64,
    b"PK\x03\x04 not a zip",
    b"{}",
    b"[1, 2",
    b"null",
    "ünicode".encode("utf-16"),
    b"\x80\x04N.",
]
TOLD = (ValueError, OSError, TypeError)  # what the command line turns into a sentence


def harmed(content, count=40):
    """Cut, bits turned, bytes doubled; and files of another kind."""
    rng = random.Random(0)
    for _ in range(count):
        at = rng.randrange(len(content))
        yield content[:at]
        yield content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]
        yield content[:at] + content[at : at + 16] + content[at:]
    yield from FOREIGN


def survives(path, read, count=40):
    """Reading goes well or ends in a sentence; the file is what it was."""
    content, told = path.read_bytes(), 0
    for bad in harmed(content, count):
        path.write_bytes(bad)
        try:
            read()
        except TOLD as error:
            told += 1
            assert str(error).strip() and "\n\n" not in str(error).strip(), repr(error)
        assert path.read_bytes() == bad
    path.write_bytes(content)
    read()
    assert told >= len(FOREIGN) - 2, "some of these were no such file"


def some_numbers():
    generator = torch.Generator().manual_seed(0)
    return torch.rand(30, 3, generator=generator).numpy(), np.arange(30) % 3


@pytest.mark.filterwarnings("ignore")  # numpy's, of numbers that a bit has made strange
def test_npz(tmp_path):
    x, y = some_numbers()
    np.savez(tmp_path / "data.npz", x=x, y=y)
    survives(tmp_path / "data.npz", lambda: sources.npz(tmp_path / "data.npz"))


@pytest.mark.filterwarnings("ignore")
def test_tables(tmp_path):
    x, y = some_numbers()
    (tmp_path / "data.csv").write_text(
        "a,b,c,y\n" + "\n".join(",".join(map(str, [*r, c])) for r, c in zip(x, y, strict=True))
    )
    survives(tmp_path / "data.csv", lambda: sources.table(tmp_path / "data.csv", target="y"))
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(arrow.table({"a": x[:, 0], "y": y}), tmp_path / "data.parquet")
    survives(tmp_path / "data.parquet", lambda: sources.table(tmp_path / "data.parquet", target="y"))


def test_results(tmp_path):
    stream = streams.digits(scenario="class").first(2)
    path = everlearn.run(nets.mlp, METHODS["finetune"](), stream, iterations=1).save(tmp_path)
    survives(path, lambda: results.load(tmp_path))


@pytest.mark.filterwarnings("ignore:A result")
@pytest.mark.filterwarnings("ignore:.* is damaged or not a result")
def test_a_harmed_result_is_done_again_and_replaced(tmp_path):
    stream = streams.digits(scenario="class").first(2)
    [path] = [everlearn.run(nets.mlp, METHODS["finetune"](), stream, iterations=1).save(tmp_path)]
    whole = results.Result.load(path).accuracy
    for bad in harmed(path.read_bytes(), 1):
        path.write_bytes(bad)
        again = everlearn.run(nets.mlp, METHODS["finetune"](), stream, iterations=1, out=tmp_path)
        assert again.accuracy.shape == whole.shape


def test_configurations(tmp_path, capsys):
    pytest.importorskip("cyclopts")
    from everlearn.cli.app import start

    path = tmp_path / "plan.yaml"
    path.write_text(
        "stream: digits\nmethods: [ewc, er]\nset:\n  ewc: {strength: 30}\nseeds: 2\nlr: 0.01\nhidden: 400,400\n"
    )
    content = path.read_bytes()
    for bad in harmed(content, 12):
        path.write_bytes(bad)
        code = start(["run", str(path), "--dry-run"])
        said = capsys.readouterr()
        assert code == 0 or (code == 2 and said.err.startswith("everlearn: ")), said.err


@pytest.mark.filterwarnings("ignore")
def test_method_states(tmp_path):
    method = ER(5)
    method.observe(everlearn.Batch(torch.rand(4, 3), torch.arange(4)), torch.rand(4, 4))
    path = save_method(method, tmp_path)
    survives(path, lambda: load_method(ER(5), tmp_path), 60)


def test_deployed_weights_and_their_state(tmp_path):
    def make():
        torch.manual_seed(0)
        return torch.nn.Linear(3, 3)

    x, y = some_numbers()
    np.savez(tmp_path / "data.npz", x=x, y=y)
    weights, state = tmp_path / "model.safetensors", tmp_path / "state"
    save_file(make().state_dict(), weights)
    survives(weights, lambda: updating.load(make, weights), 20)
    everlearn.update(make, weights, state, tmp_path / "data.npz", ER(10), tolerance=100.0)
    np.savez(tmp_path / "more.npz", x=x + 1, y=y)
    shutil.copytree(tmp_path, kept := tmp_path.parent / f"{tmp_path.name} kept")
    for path in sorted(
        p.relative_to(state) for p in state.rglob("*") if p.is_file() and p.suffix in (".json", ".pt", ".safetensors")
    ):
        for bad in [*harmed((state / path).read_bytes(), 1)][:6]:
            (state / path).write_bytes(bad)
            before = weights.read_bytes()
            try:
                everlearn.update(make, weights, state, tmp_path / "more.npz", ER(10), tolerance=100.0, dry_run=True)
            except TOLD as error:
                assert str(error).strip(), path
            assert weights.read_bytes() == before, path
            shutil.rmtree(state)
            shutil.copytree(kept / "state", state)


@pytest.mark.parametrize("name", ["T1", "T5"])
def test_recorded_results(name, tmp_path):
    pytest.importorskip("cyclopts")
    from everlearn.experiments.reproduce import page

    source = Path(__file__).parents[1] / "docs" / "results" / f"{name}.json"
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / f"{name}.json").write_text(json.dumps(json.loads(source.read_text())))
    survives(folder / f"{name}.json", lambda: page(folder), 5)
