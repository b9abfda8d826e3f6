"""The plot is legible with any number of methods."""

from itertools import pairwise

import pytest
from matplotlib import figure

from everlearn.results.report.plot import png, style
from tests.results.report.test_html import result


def saved_figure(monkeypatch, results):
    """Plot the results and return the figure that was saved."""
    figures = []
    save = figure.Figure.savefig

    def record(self, *args, **kwargs):
        figures.append(self)
        return save(self, *args, **kwargs)

    monkeypatch.setattr(figure.Figure, "savefig", record)
    assert png(results).startswith(b"\x89PNG")
    return figures[0]


@pytest.mark.parametrize("count", [1, 21, 40])
def test_every_method_has_a_unique_style_and_a_legend_entry(count, monkeypatch):
    names = [f"Method{i:02}(strength={i}.0)" for i in range(count)]
    results = [result(name, scenario) for name in names for scenario in ("task", "class")]
    plot = saved_figure(monkeypatch, results)
    for axis in plot.axes:
        styles = [(p.get_color(), p.get_marker(), p.get_markerfacecolor(), p.get_linestyle()) for p in axis.get_lines()]
        assert len(styles) == len(set(styles)) == count
    (legend,) = [*plot.legends, *(axis.get_legend() for axis in plot.axes if axis.get_legend())]
    assert [text.get_text() for text in legend.get_texts()] == names
    box = legend.get_window_extent()
    page = plot.bbox
    assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= page.x1 and box.y1 <= page.y1
    assert not any(box.overlaps(axis.get_window_extent()) for axis in plot.axes), "the legend hides no point"
    assert all(axis.get_window_extent().height > 200 for axis in plot.axes)


def test_points_differ_without_lines():
    styles = [{**style(i), "linestyle": ""} for i in range(40)]
    assert all(a != b for i, a in enumerate(styles) for b in styles[:i])


def test_axes_span_at_least_five_points_and_are_labeled_in_percent(monkeypatch):
    similar_results = [result(name, tasks=2) for name in ("EWC", "ER")]
    for i, similar in enumerate(similar_results):
        similar.accuracy[:] = 0.9 + 0.00002 * i
    trade_off, average = saved_figure(monkeypatch, similar_results).axes
    for low, high in (trade_off.get_xlim(), trade_off.get_ylim(), average.get_ylim()):
        assert high - low >= 5 - 1e-9
        assert low < 90
        assert high > 90.002
    labels = trade_off.get_xlabel(), trade_off.get_ylabel(), average.get_ylabel()
    assert labels == ("accuracy on new tasks (%)", "accuracy on old tasks (%)", "average over tasks so far (%)")
    texts = [t.get_window_extent() for t in trade_off.get_xticklabels()]
    assert not any(a.overlaps(b) for a, b in pairwise(texts)), "tick labels do not overlap"


def test_other_scores_are_not_called_accuracy(monkeypatch):
    regression = result("EWC", tasks=2)
    regression.config["score"] = "explained variance"
    trade_off, average = saved_figure(monkeypatch, [regression]).axes
    assert trade_off.get_xlabel() == "explained variance on new tasks"
    assert "%" not in trade_off.get_ylabel() + average.get_ylabel()
