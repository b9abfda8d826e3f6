"""One odd file among results is named, and the others are shown."""

import copy
import json
import math
import os
import warnings

import numpy as np
import pytest
import torch

pytest.importorskip("cyclopts")
from everlearn import Method, Result, nets, run, streams
from everlearn.cli.app import start
from everlearn.results import format as result_format
from everlearn.results import result as results
from everlearn.results.report.html import html
from everlearn.results.report.plot import png
from everlearn.results.report.rows import as_csv, as_markdown
from everlearn.results.report.serve import page
from everlearn.results.report.table import overview, table
from tests.results.report.test_html import result

ODD = [None, True, -1, 1e300, "text", [], {"a": 1}, [[1, 2], [3]], 10**29]


def leaves(content, path=()):
    """Every place in a file, by the keys that lead to it."""
    yield path
    if isinstance(content, dict):
        for key, value in content.items():
            yield from leaves(value, (*path, key))
    elif isinstance(content, list):
        for i, value in enumerate(content):
            yield from leaves(value, (*path, i))


def replaced(content, path, value):
    if not path:
        return value
    content = copy.deepcopy(content)
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return content


def whole(tmp_path):
    """A file as runs write it."""
    stream = streams.digits(scenario="class").first(2)
    path = run(lambda i, o: nets.mlp(i, o, hidden=(4,)), Method(), stream, iterations=1).save(tmp_path)
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow")
def test_whatever_is_read_can_be_shown_beside_the_others(tmp_path):
    content, path, read, refused = whole(tmp_path), tmp_path / "odd.json", 0, 0
    others = [result("joint"), result("EWC"), Result.load(results.result_files(tmp_path)[0])]
    for place in leaves(content):
        for value in ODD:
            path.write_text(json.dumps(replaced(content, place, value)))
            try:
                odd = Result.load(path)
            except ValueError as error:
                refused += 1
                assert "odd.json is not a whole Everlearn result" in str(error)
                continue
            read += 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # of numbers beyond all sense, as of sizes below
                for shown in (table, overview, as_csv, as_markdown, html, str):
                    assert shown([odd, *others])
    assert read > 100 and refused > 200


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('"seed": NaN', "NaN is no number"),
        ('"seed": 1e999', "1e999 is too large"),
        ('"seed": ' + "9" * 400, "is too large"),
        ('"extra": ' + "[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('"extra": ' + "[" * 100 + "]" * 100, "nested too deeply"),
        ('"seed": "one"', "config.seed is no whole number"),
        ('"stream": {"tasks": 9}', "config.stream.tasks is 9 but accuracy has 3 columns"),
    ],
    ids=["nan", "infinite", "long", "deep", "less deep", "kind", "tasks"],
)
def test_one_odd_file_is_named_and_the_others_are_reported(text, why, tmp_path, capsys):
    good = result("EWC").save(tmp_path)
    content = json.loads(good.read_text())
    content["config"] |= {"method": "odd", "CHANGE": 0}
    (tmp_path / "odd.json").write_text(json.dumps(content).replace('"CHANGE": 0', text))
    for form in ("html", "csv", "md", "png"):
        assert start(["report", str(tmp_path), "--format", form]) == 1
        said = capsys.readouterr()
        assert "odd.json is not a whole Everlearn result" in said.err and why in said.err
        assert "EWC" in said.out and (tmp_path / f"report.{form}").exists()
    assert '"method":"EWC"' in page(tmp_path, 5)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_what_is_no_file_is_not_waited_for(tmp_path, capsys):
    result("EWC").save(tmp_path)
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "nowhere.json").symlink_to(tmp_path / "gone")
    assert '"method":"EWC"' in page(tmp_path, 5)
    assert start(["report", str(tmp_path)]) == 0
    with pytest.raises(ValueError, match="it is not a plain file"):
        Result.load(tmp_path / "pipe.json")
    with pytest.raises(FileNotFoundError, match="There is no file"):
        Result.load(tmp_path / "none.json")


def test_a_file_too_large_is_not_read(tmp_path, monkeypatch):
    path = result("EWC").save(tmp_path)
    monkeypatch.setattr(result_format, "LARGEST", 100)
    with pytest.raises(ValueError, match=r"it has [\d,]+ bytes, allowed: 100"):
        Result.load(path)


def test_results_with_gaps_are_drawn(tmp_path):
    gaps = result("EWC")
    gaps.accuracy[0, 1:] = gaps.accuracy[2, 0] = math.nan
    few = result("EWC", seed=1)
    few.accuracy = few.accuracy[:2, :2]
    assert png([gaps, few, result("$\\frac$"), result("_hidden")]).startswith(b"\x89PNG")


def test_no_run_is_lost_for_a_number_that_json_has_not(tmp_path):
    (x, y), test = streams.digits_data()
    stream = streams.split((x[:200], y[:200]), test, tasks=2, class_order=np.arange(10), seed=np.int64(3))
    odd = {"lr": 0.1, "weight_decay": np.float32(0.0), "momentum": 0.0}

    def make(parameters):
        optimizer = torch.optim.SGD(parameters, **odd)
        optimizer.param_groups[0]["limit"] = math.inf
        return optimizer

    made = run(nets.mlp, Method(), stream, optimizer=make, iterations=1, out=tmp_path)
    (read,) = results.load(tmp_path)
    assert made.config == read.config and read.config["training"]["groups"][0]["limit"] == "inf"


def test_scores_without_end_are_kept_as_unknown(tmp_path):
    odd = result("EWC", width=math.inf)
    odd.initial_accuracy = [-math.inf] * 3
    read = Result.load(odd.save(tmp_path))
    assert np.isnan(read.initial_accuracy).all() and read.cost["facts"][0] == {"width": None} and "EWC" in table([read])
