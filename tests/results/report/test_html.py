"""The page: what it holds, what it cannot be made to do, and how it behaves in a browser."""

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
from everlearn.results.report.rows import as_csv, as_markdown, runs, some
from everlearn.results.result import Result

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NASTY = "</script><img src=x onerror=alert(1)>"


def result(method="EWC", scenario="task", seed=0, tasks=3, stream="digits", **facts):
    random = np.random.default_rng([seed, len(method), len(scenario)])
    config = {"method": method, "scenario": scenario, "seed": seed, "stream": {"name": stream}, "score": "accuracy"}
    cost = {
        "seconds": {"train": 1.0 + seed, "consolidate": 0.5, "evaluate": 0.1},
        "parameters": [100] * tasks,
        "state_bytes": [2048] * tasks,
        "peak_memory": 10**6,
        "facts": [{name: value * (t + 1) for name, value in facts.items()} for t in range(tasks)],
    }
    made = {"time": "2026-01-01T00:00:00+00:00", "versions": {"torch": "2"}, "commit": None, "threads": 1}
    return Result(random.uniform(size=(tasks, tasks)), {**config, "fingerprints": {}}, [0.1] * tasks, cost, made)


def several():
    return [
        result(m, s, seed, **({"capacity": 0.2, "importance 50 %": 0.1} if m == "HAT" else {}))
        for m in ("EWC", "HAT", "ER")
        for s in ("task", "class")
        for seed in range(2)
    ]


def data(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_the_page_holds_every_run_and_asks_for_nothing():
    page = html(several(), "My runs")
    assert len(data(page)["runs"]) == 12 and "<title>My runs</title>" in page
    assert not re.search(r"""(src|href)\s*=|@import|url\(""", page)
    first = data(page)["runs"][0]
    assert first["average"] == pytest.approx(several()[0].average_accuracy, abs=1e-5)
    assert first["old tasks"] == pytest.approx(several()[0].accuracy[-1, :-1].mean(), abs=1e-5)
    assert first["config"]["method"] == "EWC" and first["made"]["versions"] == {"torch": "2"}


def test_what_users_name_stays_text():
    page = html([result(NASTY, stream=NASTY)], NASTY)
    assert NASTY not in page and page.count("</script>") == 2
    assert data(page)["runs"][0]["method"] == NASTY


def test_a_hundred_runs_are_small_and_long_streams_are_thinned():
    page = html([result(f"M{i}", seed=i, tasks=120) for i in range(100)])
    assert len(page.encode()) < 1_500_000
    assert len(data(page)["runs"][0]["matrix"]) == 30 and data(page)["runs"][0]["tasks"][-1] == 120
    assert some(120)[0] == 0 and some(120)[-1] == 119


def test_joint_training_and_what_is_no_number():
    joint = result("joint")
    joint.accuracy = joint.accuracy[-1:]
    (run,) = runs([joint])
    assert run["forgetting"] is None and len(run["matrix"]) == 1 and len(run["matrix"][0]) == 3
    assert data(html([joint]))["runs"][0]["forgetting"] is None


def test_the_same_numbers_in_other_formats(tmp_path, capsys):
    rows = list(csv.DictReader(io.StringIO(as_csv([*several(), result("=cmd()")]))))
    assert len(rows) == 13 and float(rows[0]["average"]) == pytest.approx(several()[0].average_accuracy, abs=1e-5)
    assert "'=cmd()" in {row["method"] for row in rows}
    text = as_markdown([result("a|b"), result("a|b", seed=1)])
    assert "| a\\|b | 2 |" in text and "±" in text
    for r in several():
        r.save(tmp_path)
    for kind, first in (("html", b"<!doctype html>"), ("md", b"## digits"), ("csv", b"stream,"), ("png", b"\x89PNG")):
        assert start(["report", str(tmp_path), "--format", kind]) == 0
        assert (tmp_path / f"report.{kind}").read_bytes().startswith(first)
    assert start(["report", str(tmp_path), "--format", "text"]) == 0
    assert "digits, task-incremental" in capsys.readouterr().out
    assert start(["report", str(tmp_path), "--format", "pdf"]) == 2


LISTEN = """<script>
window.problems = [];
addEventListener("error", (e) => problems.push(e.message));
addEventListener("securitypolicyviolation", (e) => problems.push("asked for " + e.blockedURI));
</script>"""
PROBE = """<script>
const rows = () => [...document.querySelectorAll(".summary tbody tr")].map((r) => r.innerText.split("\\t"));
const found = { all: rows().length, titles: [...document.querySelectorAll("h2")].map((h) => h.innerText) };
document.querySelector('button[data-sort="method"]').click();
found.up = rows().map((r) => r[0]);
document.querySelector('button[data-sort="method"]').click();
found.down = rows().map((r) => r[0]);
found.sorted = document.querySelector('button[data-sort="method"]').closest("th").getAttribute("aria-sort");
found.focus = document.activeElement.dataset.sort;
const scenario = document.querySelector('select[data-filter="scenario"]');
scenario.value = "class";
scenario.dispatchEvent(new Event("change"));
found.filtered = rows().map((r) => r[1]);
document.querySelector('input[data-method="0"]').click();
found.fewer = rows().map((r) => r[0]);
const chart = document.querySelector("figure svg");
chart.focus();
chart.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
found.tip = document.getElementById("tip").innerText;
found.points = chart.querySelectorAll("path").length;
found.front = chart.querySelectorAll(".front").length;
found.wide = document.documentElement.scrollWidth <= innerWidth;
found.problems = problems;
const show = (more) => { const out = document.createElement("pre"); out.id = "probe"; out.textContent = JSON.stringify({ ...found, ...more }); document.body.append(out); };
if (window.axe) axe.run().then((r) => show({ axe: r.violations.filter((v) => ["serious", "critical"].includes(v.impact)).map((v) => v.id + ": " + v.nodes[0].html) }));
else show({});
</script>"""


def browse(page, folder, *flags):
    """What the probe finds, in a browser."""
    if BROWSER is None:
        pytest.skip("no Chromium here")
    given = os.environ.get("AXE_CORE")  # the file axe.min.js of the npm package axe-core
    axe = f"<script>{Path(given).read_text()}</script>" if given else ""
    file = folder / "page.html"
    file.write_text(page.replace("<title>", LISTEN + "<title>", 1).replace("</body>", axe + PROBE + "</body>"))
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
def test_in_a_browser_it_sorts_filters_and_speaks(size, tmp_path):
    found = browse(html(several()), tmp_path, f"--window-size={size}")
    assert found["problems"] == [] and found.get("axe", []) == []
    assert found["all"] == 6
    assert found["titles"] == [
        "Summary", "Stability and plasticity", "Cost", "Over the stream", "Accuracy matrices", "Task by task",
        "Capacity and growth", "Importances", "Runs",
    ]  # fmt: skip
    assert found["up"] == sorted(found["up"]) and found["down"] == found["up"][::-1]
    assert found["sorted"] == "descending" and found["focus"] == "method"
    assert found["filtered"] == ["class"] * 3
    assert len(found["fewer"]) == 2
    assert "class-incremental, seed" in found["tip"] and "old tasks" in found["tip"]
    assert found["points"] == 4 and found["front"] == 1
    assert found["wide"]


def test_in_a_browser_nasty_names_stay_names(tmp_path):
    found = browse(
        html([result(NASTY), result("EWC"), result(NASTY, "class"), result("EWC", "class")], NASTY), tmp_path
    )
    assert found["problems"] == [] and NASTY in found["up"]
