"""An invalid file among results is named, and the valid ones are shown."""

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
from everlearn.results.report.overview import overview
from everlearn.results.report.plot import png
from everlearn.results.report.rows import as_csv, as_markdown
from everlearn.results.report.serve import ReportPage
from everlearn.results.report.table import table
from tests.results.report.test_html import result

UNUSUAL_VALUES = [None, True, -1, 1e300, "text", [], {"a": 1}, [[1, 2], [3]], 10**29]


def key_paths(content, path=()):
    """Yield the sequence of keys to every value in a file."""
    yield path
    if isinstance(content, dict):
        for key, value in content.items():
            yield from key_paths(value, (*path, key))
    elif isinstance(content, list):
        for i, value in enumerate(content):
            yield from key_paths(value, (*path, i))


def replace_value(content, path, value):
    if not path:
        return value
    content = copy.deepcopy(content)
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return content


def stored_result(tmp_path):
    """Save the result of a run and return the content of its file."""
    stream = streams.digits(scenario="class").first(2)
    path = run(lambda i, o: nets.mlp(i, o, hidden=(4,)), Method(), stream, iterations=1).save(tmp_path)
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow")
def test_every_accepted_file_can_be_shown_with_the_others(tmp_path):
    content = stored_result(tmp_path)
    path = tmp_path / "unusual.json"
    num_read = 0
    num_refused = 0
    usual_results = [result("joint"), result("EWC"), Result.load(results.result_files(tmp_path)[0])]
    for keys in key_paths(content):
        for value in UNUSUAL_VALUES:
            path.write_text(json.dumps(replace_value(content, keys, value)))
            try:
                unusual = Result.load(path)
            except ValueError as error:
                num_refused += 1
                assert "unusual.json is not a valid Everlearn result" in str(error)
                continue
            num_read += 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # from absurdly large numbers
                for show in (table, overview, as_csv, as_markdown, html, str):
                    assert show([unusual, *usual_results])
    assert num_read > 100 and num_refused > 200


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('"seed": NaN', "NaN is not a number"),
        ('"seed": 1e999', "1e999 is too large"),
        ('"seed": ' + "9" * 400, "is too large"),
        ('"extra": ' + "[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('"extra": ' + "[" * 100 + "]" * 100, "nested too deeply"),
        ('"seed": "one"', "config.seed is not an integer"),
        ('"stream": {"tasks": 9}', "config.stream.tasks is 9 but accuracy has 3 columns"),
    ],
    ids=["nan", "infinite", "long", "deep", "less deep", "kind", "tasks"],
)
def test_an_invalid_file_is_named_and_the_others_are_reported(text, reason, tmp_path, capsys):
    good = result("EWC").save(tmp_path)
    content = json.loads(good.read_text())
    content["config"] |= {"method": "unusual", "CHANGE": 0}
    (tmp_path / "unusual.json").write_text(json.dumps(content).replace('"CHANGE": 0', text))
    for form in ("html", "csv", "md", "png"):
        assert start(["report", str(tmp_path), "--format", form]) == 1
        printed = capsys.readouterr()
        assert "unusual.json is not a valid Everlearn result" in printed.err and reason in printed.err
        assert "EWC" in printed.out and (tmp_path / f"report.{form}").exists()
    assert '"method":"EWC"' in ReportPage(tmp_path, 5).render()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_pipes_and_folders_are_skipped(tmp_path, capsys):
    result("EWC").save(tmp_path)
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "nowhere.json").symlink_to(tmp_path / "missing")
    assert '"method":"EWC"' in ReportPage(tmp_path, 5).render()
    assert start(["report", str(tmp_path)]) == 0
    with pytest.raises(ValueError, match="it is not a regular file"):
        Result.load(tmp_path / "pipe.json")
    with pytest.raises(FileNotFoundError, match="There is no file"):
        Result.load(tmp_path / "none.json")


def test_a_file_too_large_is_not_read(tmp_path, monkeypatch):
    path = result("EWC").save(tmp_path)
    monkeypatch.setattr(result_format, "MAX_FILE_BYTES", 100)
    with pytest.raises(ValueError, match=r"it has [\d,]+ bytes, allowed: 100"):
        Result.load(path)


def test_results_with_missing_values_are_plotted(tmp_path):
    incomplete = result("EWC")
    incomplete.accuracy[0, 1:] = math.nan
    incomplete.accuracy[2, 0] = math.nan
    shorter = result("EWC", seed=1)
    shorter.accuracy = shorter.accuracy[:2, :2]
    assert png([incomplete, shorter, result("$\\frac$"), result("_hidden")]).startswith(b"\x89PNG")


def test_a_run_with_settings_without_a_json_form_is_saved(tmp_path):
    (x, y), test = streams.digits_data()
    stream = streams.split((x[:200], y[:200]), test, tasks=2, class_order=np.arange(10), seed=np.int64(3))
    settings = {"lr": 0.1, "weight_decay": np.float32(0.0), "momentum": 0.0}

    def make(parameters):
        optimizer = torch.optim.SGD(parameters, **settings)
        optimizer.param_groups[0]["limit"] = math.inf
        return optimizer

    created = run(nets.mlp, Method(), stream, optimizer=make, iterations=1, out=tmp_path)
    (loaded,) = results.load(tmp_path)
    assert created.config == loaded.config and loaded.config["training"]["groups"][0]["limit"] == "inf"


def test_infinite_scores_are_stored_as_missing(tmp_path):
    infinite = result("EWC", width=math.inf)
    infinite.initial_accuracy = [-math.inf] * 3
    loaded = Result.load(infinite.save(tmp_path))
    assert np.isnan(loaded.initial_accuracy).all()
    assert loaded.cost["diagnostics"][0] == {"width": None}
    assert "EWC" in table([loaded])
