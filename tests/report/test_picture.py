"""The picture can be read, however many methods there are."""

import pytest
from matplotlib import figure
from tests.report.test_html import result

from everlearn.report.picture import png, style


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
