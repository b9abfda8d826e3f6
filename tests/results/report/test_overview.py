import numpy as np
import pytest
from scipy import stats

from everlearn import Result
from everlearn.results.report.overview import overview
from everlearn.results.significance import paired_t_test

SEEDS = range(3)


def result(method, seed, accuracy, scenario="class", seconds=1.0):
    config = {
        "method": method,
        "seed": seed,
        "scenario": scenario,
        "stream": {"name": "s", "seed": seed},
        "training": {"epochs": 1},
        "fingerprints": {"data": str(seed)},
    }
    rows = [[accuracy, accuracy]] if method == "joint" else [[accuracy + 0.1, 0.0], [accuracy, accuracy]]
    return Result(np.array(rows), config, cost={"seconds": {"train": seconds}})


def runs(method, accuracies, **options):
    return [result(method, seed, accuracy, **options) for seed, accuracy in enumerate(accuracies)]


def rows_of(text):
    lines = text.splitlines()
    return lines[3 : lines.index("")]


def row_of(text, name):
    (row,) = [row for row in rows_of(text) if row.strip().startswith(name + " ")]
    return row.split(None, 1)[1].rstrip()


RESULTS = [
    *runs("finetune", [0.20, 0.25, 0.15]),
    *runs("joint", [0.90, 0.92, 0.94]),
    *runs("EWC", [0.20, 0.30, 0.13]),  # p = 0.7
    *runs("MAS", [0.10, 0.15, 0.05]),  # worse by 0.1 with each seed
    *runs("RanPAC(dimension=500)", [0.8, 0.9, 0.7]),
    *runs("FeCAM", [0.6, 0.7, 0.7]),
]


@pytest.mark.parametrize("num_pairs", range(2, 10))
def test_paired_t_test_is_that_of_scipy(num_pairs):
    rng = np.random.default_rng(num_pairs)
    for effect in (0.0, 0.5, 3.0):
        a = rng.normal(size=num_pairs)
        b = a + rng.normal(size=num_pairs) + effect
        assert paired_t_test(a, b) == pytest.approx(stats.ttest_rel(a, b).pvalue, abs=1e-12)


def test_paired_t_test_without_spread():
    assert np.isnan(paired_t_test([1.0], [0.0]))
    assert paired_t_test([1.0, 2.0], [1.0, 2.0]) == 1
    assert paired_t_test([1.0, 2.0], [0.0, 1.0]) == 0


def test_cells_show_mean_deviation_forgetting_and_test():
    text = overview(RESULTS)
    # 0.8, 0.9, 0.7: mean 0.8, standard deviation 0.1; the differences to fine-tuning are 0.6, 0.65, 0.55.
    assert row_of(text, "ranpac") == "80.0±10.0 (10.0)+*  1.0"
    assert row_of(text, "fecam") == "66.7±5.8  (10.0)+   1.0"
    assert row_of(text, "finetune") == "20.0±5.0  (10.0)    1.0"
    assert row_of(text, "joint") == "92.0±2.0        +   1.0"
    assert row_of(text, "ewc") == "21.0±8.5  (10.0) *  1.0"
    assert row_of(text, "mas") == "10.0±5.0  (10.0)-   1.0"
    assert "not at its defaults: RanPAC(dimension=500)" in text


def test_methods_are_grouped_and_sorted_by_the_scenario_of_their_family():
    by_class = [*RESULTS, *runs("PNN", [0.5] * 3), *runs("HAT", [0.6] * 3)]
    by_task = [*runs("PNN", [0.9] * 3, scenario="task"), *runs("HAT", [0.8] * 3, scenario="task")]
    text = overview(by_class + by_task)
    names = [row.split("  ")[0] or "  " + row.split()[0] for row in rows_of(text)]
    assert names == [
        "references", "  joint", "  finetune", "regularization", "  ewc", "  mas",
        "isolation", "  pnn", "  hat", "heads", "  ranpac", "  fecam",
    ]  # fmt: skip
    # Columns are in the order of the scenarios, and the arrow is in the column that sorts.
    header = text.splitlines()[1]
    assert header.index("task-incremental") < header.index("class-incremental")
    (isolation,) = [row for row in rows_of(text) if row.startswith("isolation")]
    (heads,) = [row for row in rows_of(text) if row.startswith("heads")]
    assert isolation.index("↓") < header.index("class-incremental") <= heads.index("↓")
    assert "*" not in row_of(text, "joint") and row_of(text, "hat").count("*") == 1


def test_settings_are_shown_where_a_method_has_several_rows():
    text = overview([*runs("EWC(strength=1.0)", [0.5] * 3), *runs("EWC(strength=2.0)", [0.6] * 3)])
    assert "  EWC(strength=1.0)" in text and "  EWC(strength=2.0)" in text


def test_one_seed_has_no_test():
    text = overview([result("finetune", 0, 0.2), result("ER", 0, 0.8), result("GEM", 0, 0.7)])
    assert row_of(text, "er") == "80.0 (10.0) *  1.0" and "±" not in "".join(rows_of(text)) and "1 seed" in text


def test_the_table_is_at_most_80_columns_wide():
    results = []
    for scenario in ("task", "domain", "class"):
        results += runs("finetune", [0.2, 0.25, 0.5], scenario=scenario)
        results += runs("StreamingLDA", [0.8, 0.82, 0.83], scenario=scenario)
    assert max(map(len, rows_of(overview(results)))) <= 82  # 80 unless a deviation has two digits before the point
