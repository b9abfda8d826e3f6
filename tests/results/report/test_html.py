"""Content of the HTML report, resistance to hostile names, and behavior in a browser."""

import csv
import io
import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cyclopts")
from everlearn.cli.app import start
from everlearn.results.report.html import html
from everlearn.results.report.rows import as_csv, as_markdown, evenly_spaced, run_rows
from everlearn.results.result import Result

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "</script><img src=x onerror=alert(1)>"


def result(method="EWC", scenario="task", seed=0, tasks=3, stream="digits", **diagnostics):
    random = np.random.default_rng([seed, len(method), len(scenario)])
    config = {"method": method, "scenario": scenario, "seed": seed, "stream": {"name": stream}, "score": "accuracy"}
    cost = {
        "seconds": {"train": 1.0 + seed, "consolidate": 0.5, "evaluate": 0.1},
        "parameters": [100] * tasks,
        "state_bytes": [2048] * tasks,
        "peak_memory": 10**6,
        "diagnostics": [{name: value * (t + 1) for name, value in diagnostics.items()} for t in range(tasks)],
    }
    provenance = {"time": "2026-01-01T00:00:00+00:00", "versions": {"torch": "2"}, "commit": None, "threads": 1}
    return Result(random.uniform(size=(tasks, tasks)), {**config, "fingerprints": {}}, [0.1] * tasks, cost, provenance)


def several_results():
    diagnostics = {"EWC": {}, "HAT": {"capacity": 0.2, "importance 50 %": 0.1}, "ER": {}}
    return [
        result(method, scenario, seed, **diagnostics[method])
        for method in diagnostics
        for scenario in ("task", "class")
        for seed in range(2)
    ]


def data(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_the_page_contains_every_run_and_requests_nothing():
    page = html(several_results(), "My runs")
    assert len(data(page)["runs"]) == 12 and "<title>My runs</title>" in page
    assert not re.search(r"""(src|href)\s*=|@import|url\(""", page)
    first = data(page)["runs"][0]
    assert first["average"] == pytest.approx(several_results()[0].average_accuracy, abs=1e-5)
    assert first["old tasks"] == pytest.approx(several_results()[0].accuracy[-1, :-1].mean(), abs=1e-5)
    assert first["config"]["method"] == "EWC" and first["provenance"]["versions"] == {"torch": "2"}


def test_hostile_names_stay_text():
    page = html([result(HOSTILE, stream=HOSTILE)], HOSTILE)
    assert HOSTILE not in page and page.count("</script>") == 2
    assert data(page)["runs"][0]["method"] == HOSTILE


def test_a_hundred_runs_are_small_and_long_streams_are_thinned():
    page = html([result(f"M{i}", seed=i, tasks=120) for i in range(100)])
    assert len(page.encode()) < 1_500_000
    assert len(data(page)["runs"][0]["matrix"]) == 30 and data(page)["runs"][0]["tasks"][-1] == 120
    assert evenly_spaced(120)[0] == 0 and evenly_spaced(120)[-1] == 119


def test_joint_training_has_no_forgetting():
    joint = result("joint")
    joint.accuracy = joint.accuracy[-1:]
    (run,) = run_rows([joint])
    assert run["forgetting"] is None and len(run["matrix"]) == 1 and len(run["matrix"][0]) == 3
    assert data(html([joint]))["runs"][0]["forgetting"] is None


def test_all_formats_have_the_same_numbers(tmp_path, capsys):
    rows = list(csv.DictReader(io.StringIO(as_csv([*several_results(), result("=cmd()")]))))
    assert len(rows) == 13 and float(rows[0]["average"]) == pytest.approx(
        several_results()[0].average_accuracy, abs=1e-5
    )
    assert "'=cmd()" in {row["method"] for row in rows}
    text = as_markdown([result("a|b"), result("a|b", seed=1)])
    assert "| a\\|b | 2 |" in text and "±" in text
    for r in several_results():
        r.save(tmp_path)
    for kind, first in (("html", b"<!doctype html>"), ("md", b"## digits"), ("csv", b"stream,"), ("png", b"\x89PNG")):
        assert start(["report", str(tmp_path), "--format", kind]) == 0
        assert (tmp_path / f"report.{kind}").read_bytes().startswith(first)
    assert start(["report", str(tmp_path), "--format", "text"]) == 0
    assert "digits, task-incremental" in capsys.readouterr().out
    assert start(["report", str(tmp_path), "--format", "pdf"]) == 2


ERROR_LISTENER = """<script>
window.problems = [];
addEventListener("error", (e) => problems.push(e.message));
addEventListener("securitypolicyviolation", (e) => problems.push("request to " + e.blockedURI));
</script>"""
PROBE = """<script>
const rows = () => [...document.querySelectorAll(".summary tbody tr")].map((r) => r.innerText.split("\\t"));
const probe = { all: rows().length, titles: [...document.querySelectorAll("h2")].map((h) => h.innerText) };
document.querySelector('button[data-sort="method"]').click();
probe.up = rows().map((r) => r[0]);
document.querySelector('button[data-sort="method"]').click();
probe.down = rows().map((r) => r[0]);
probe.sorted = document.querySelector('button[data-sort="method"]').closest("th").getAttribute("aria-sort");
probe.focus = document.activeElement.dataset.sort;
const scenario = document.querySelector('select[data-filter="scenario"]');
scenario.value = "class";
scenario.dispatchEvent(new Event("change"));
probe.filtered = rows().map((r) => r[1]);
document.querySelector('input[data-method="0"]').click();
probe.fewer = rows().map((r) => r[0]);
const chart = document.querySelector("figure svg");
chart.focus();
chart.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
probe.tip = document.getElementById("tip").innerText;
probe.points = chart.querySelectorAll("path").length;
probe.front = chart.querySelectorAll(".front").length;
probe.wide = document.documentElement.scrollWidth <= innerWidth;
probe.problems = problems;
const show = (more) => {
  const output = document.createElement("pre");
  output.id = "probe";
  output.textContent = JSON.stringify({ ...probe, ...more });
  document.body.append(output);
};
const isSevere = (violation) => ["serious", "critical"].includes(violation.impact);
const describeViolation = (violation) => violation.id + ": " + violation.nodes[0].html;
if (window.axe) axe.run().then((report) => show({ axe: report.violations.filter(isSevere).map(describeViolation) }));
else show({});
</script>"""


def browse(page, folder, *flags):
    """Open the page in a browser and return the probe's values."""
    if BROWSER is None:
        pytest.skip("needs Chromium")
    axe_file = os.environ.get("AXE_CORE")  # the file axe.min.js of the npm package axe-core
    axe = f"<script>{Path(axe_file).read_text()}</script>" if axe_file else ""
    file = folder / "page.html"
    file.write_text(page.replace("<title>", ERROR_LISTENER + "<title>", 1).replace("</body>", axe + PROBE + "</body>"))
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=20000",
        f"--user-data-dir={folder / 'profile'}",
    ]
    done = subprocess.run(
        [*command, *flags, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    return json.loads(unescape(re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)[1]))


@pytest.mark.parametrize("size", ["1280,900", "390,800"], ids=["desk", "phone"])
def test_sorting_filters_and_tooltips_in_a_browser(size, tmp_path):
    probe = browse(html(several_results()), tmp_path, f"--window-size={size}")
    assert probe["problems"] == [] and probe.get("axe", []) == []
    assert probe["all"] == 6
    assert probe["titles"] == [
        *("Summary", "Stability and plasticity", "Cost", "Average over the stream", "Accuracy matrices"),
        *("Accuracy per task", "Capacity and growth", "Importances", "Runs"),
    ]
    assert probe["up"] == sorted(probe["up"]) and probe["down"] == probe["up"][::-1]
    assert probe["sorted"] == "descending" and probe["focus"] == "method"
    assert probe["filtered"] == ["class"] * 3
    assert len(probe["fewer"]) == 2
    assert "class-incremental, seed" in probe["tip"] and "old tasks" in probe["tip"]
    assert probe["points"] == 4 and probe["front"] == 1
    assert probe["wide"]


def test_hostile_names_stay_text_in_a_browser(tmp_path):
    probe = browse(
        html([result(HOSTILE), result("EWC"), result(HOSTILE, "class"), result("EWC", "class")], HOSTILE), tmp_path
    )
    assert probe["problems"] == [] and HOSTILE in probe["up"]
