"""The picture can be read, however many methods there are."""

from itertools import pairwise

import pytest
from matplotlib import figure

from everlearn.results.report.plot import png, style
from tests.results.report.test_html import result


def drawn(monkeypatch, results):
    """The figure that is saved."""
    figures, save = [], figure.Figure.savefig

    def keep(self, *args, **kwargs):
        figures.append(self)
        return save(self, *args, **kwargs)

    monkeypatch.setattr(figure.Figure, "savefig", keep)
    assert png(results).startswith(b"\x89PNG")
    return figures[0]


@pytest.mark.parametrize("count", [1, 21, 40])
def test_every_method_has_a_style_of_its_own_and_a_place_in_the_legend(count, monkeypatch):
    names = [f"Method{i:02}(strength={i}.0)" for i in range(count)]
    whole = drawn(monkeypatch, [result(name, scenario) for name in names for scenario in ("task", "class")])
    for axis in whole.axes:
        looks = [(p.get_color(), p.get_marker(), p.get_markerfacecolor(), p.get_linestyle()) for p in axis.get_lines()]
        assert len(looks) == len(set(looks)) == count
    (legend,) = [*whole.legends, *(axis.get_legend() for axis in whole.axes if axis.get_legend())]
    assert [text.get_text() for text in legend.get_texts()] == names
    box, page = legend.get_window_extent(), whole.bbox
    assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= page.x1 and box.y1 <= page.y1
    assert not any(box.overlaps(axis.get_window_extent()) for axis in whole.axes), "it hides no point"
    assert all(axis.get_window_extent().height > 200 for axis in whole.axes)


def test_points_differ_without_lines():
    looks = [{**style(i), "linestyle": ""} for i in range(40)]
    assert all(a != b for i, a in enumerate(looks) for b in looks[:i])


def test_axes_span_at_least_five_points_and_say_percent(monkeypatch):
    near = [result(name, tasks=2) for name in ("EWC", "ER")]
    for i, one in enumerate(near):
        one.accuracy[:] = 0.9 + 0.00002 * i
    left, right = drawn(monkeypatch, near).axes
    for low, high in (left.get_xlim(), left.get_ylim(), right.get_ylim()):
        assert high - low >= 5 - 1e-9
        assert low < 90
        assert high > 90.002
    labels = left.get_xlabel(), left.get_ylabel(), right.get_ylabel()
    assert labels == ("accuracy on new tasks (%)", "accuracy on old tasks (%)", "average over tasks so far (%)")
    texts = [t.get_window_extent() for t in left.get_xticklabels()]
    assert not any(a.overlaps(b) for a, b in pairwise(texts)), "ticks can be read"


def test_other_scores_are_not_called_accuracy(monkeypatch):
    one = result("EWC", tasks=2)
    one.config["score"] = "explained variance"
    left, right = drawn(monkeypatch, [one]).axes
    assert left.get_xlabel() == "explained variance on new tasks"
    assert "%" not in left.get_ylabel() + right.get_ylabel()
