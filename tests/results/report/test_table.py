import numpy as np

from everlearn import Result
from everlearn.results.report.table import table


def result(method="finetune", seed=0, accuracy=0.5, training=None, stream=None, **config):
    full_config = {
        "method": method,
        "seed": seed,
        "scenario": "class",
        "stream": {"name": "s", "seed": seed, **(stream or {})},
        "training": training or {"epochs": 1},
        "fingerprints": {"data": str(seed)},
        **config,
    }
    rows = [[accuracy, accuracy]] if method == "joint" else [[accuracy, 0.0], [accuracy / 2, accuracy]]
    return Result(np.array(rows), full_config)


def lines(results):
    return table(results).split("\n\n")[0].splitlines()[3:]


def test_seeds_are_averaged():
    (line,) = lines([result(seed=0, accuracy=0.4), result(seed=1, accuracy=0.6)])
    assert line.split()[:5] == ["finetune", "2", "37.5", "±", "10.6"]


def test_different_settings_have_separate_rows():
    rows = lines([result(training={"epochs": e}, accuracy=0.5 - e / 100) for e in (1, 2)])
    assert [line.split("  ")[0] for line in rows] == ["finetune, epochs=1", "finetune, epochs=2"]
    rows = lines([result(stream={"tasks": 5}), result(stream={"tasks": 2}, accuracy=0.4)])
    assert [line.split("  ")[0] for line in rows] == ["finetune, tasks=5", "finetune, tasks=2"]


def test_a_seed_on_different_data_is_a_separate_experiment():
    rows = lines([result(fingerprints={"data": "a"}), result(fingerprints={"data": "b"}, accuracy=0.4)])
    assert len(rows) == 2 and all("data=" in line for line in rows)


def test_intransigence_uses_the_joint_run_of_the_same_setting():
    runs = [
        result(method=m, training={"epochs": e}, accuracy=a)
        for m, e, a in (("joint", 1, 0.9), ("finetune", 1, 0.8), ("joint", 2, 0.7), ("finetune", 2, 0.65))
    ]
    text = {line.split("  ")[0]: line.split() for line in lines(runs)}
    assert text["finetune, epochs=1"][-1] == "10.0" and text["finetune, epochs=2"][-1] == "5.0"
    assert text["joint, epochs=1"][-1] == "–"


def test_joint_training_matches_with_the_iterations_of_all_tasks():
    def with_iterations(method, iterations, accuracy, **stream):
        training = {"iterations": iterations}
        return result(method=method, training=training, accuracy=accuracy, stream={"tasks": 5, **stream})

    for merged in ({"merged": 5}, {}):  # older files do not record how many tasks were merged
        runs = [with_iterations("joint", 500, 0.9, joint=True, **merged), with_iterations("finetune", 100, 0.8)]
        text = {line.split("  ")[0]: line.split() for line in lines(runs)}
        assert set(text) == {"joint", "finetune"} and text["finetune"][-1] == "10.0"
    # In older files --iterations 100 meant 100 iterations of joint training in total.
    runs = [with_iterations("joint", 100, 0.9, joint=True), with_iterations("finetune", 100, 0.8)]
    assert {line.split("  ")[0] for line in lines(runs)} == {"joint, iterations=20", "finetune, iterations=100"}


def test_other_scores_are_not_in_percent():
    text = table([result(score="minus squared error", accuracy=-1.5)])
    assert "(minus squared error, mean ± std" in text and "-1.125" in text


def test_growing_diagnostics_are_shown_task_by_task():
    grows = result(method="grows")
    stays = result(method="stays", accuracy=0.4)
    grows.cost["diagnostics"] = [{"units added so far": 0, "width": 3}, {"units added so far": 12, "width": 3}]
    stays.cost["diagnostics"] = [{"width": 3}, {"width": 3}]
    *_, last = table([grows, stays]).split("\n\n")
    assert [line.split() for line in last.splitlines()[::2]] == [
        ["growth", "task", "1", "task", "2"], ["grows:", "units", "added", "so", "far", "0", "12"]
    ]  # fmt: skip
    assert "growth" not in table([stays])
    grows.cost["diagnostics"] = [{"units added so far": k} for k in range(25)]
    *_, last = table([grows]).split("\n\n")
    assert last.split()[1:-3][1:18:2] == [str(t) for t in range(1, 26, 3)] and last.split()[-1] == "24"
