"""The learning curves: no legend over a curve, and whatever a history has or has not."""

import pytest

from fastcross.training.run_folder import curves, draw_curves


def history(start, *names):
    columns = {"train_loss": 1.0, "validation_logloss": 1.1, "validation_auc": -1.0}
    rows = [{"step": 10 * i} | {name: columns[name] * (start + 1 / i) for name in names} for i in range(1, 9)]
    return rows


EVERYTHING = ("train_loss", "validation_logloss", "validation_auc")
MODELS = ("dcn", "deep_crossing", "dnn", "wide_deep", "fm", "lr")


@pytest.mark.parametrize("names", [("",), MODELS])
def test_the_legend_covers_no_curve(names):
    """0.1 let the legend stand within the axes, where a training curve and its legend met at the upper right."""
    figure = curves({name: history(i, *EVERYTHING) for i, name in enumerate(names)}, optimum=0.5)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert all(axes.get_legend() is None for axes in figure.axes)
    assert not any(box.overlaps(axes.get_window_extent()) for axes in figure.axes)
    assert figure.bbox.containsx(box.x0)
    assert figure.bbox.containsx(box.x1)
    shown = [text.get_text() for text in legend.get_texts()]
    assert shown == [*filter(None, names), "training", "validation", "Bayes optimum"]


def test_without_validation_there_is_one_panel():
    figure = curves({"": history(0, "train_loss")})
    assert len(figure.axes) == 1
    assert draw_curves({"": history(0, "train_loss")})[:8] == b"\x89PNG\r\n\x1a\n"
