# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Pictures show the numbers that they were given."""

from functools import partial

import numpy as np
import pytest

from megatron_mtraining.tools.report import pictures
from megatron_mtraining.tools.report.themes import COLOURS, svg_by_theme


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved, still open for a look."""
    figures = []
    close = pictures.pyplot.close
    monkeypatch.setattr(pictures.pyplot, "close", figures.append)
    yield figures
    close("all")


def image(path):
    return pictures.pyplot.imread(path)


def test_loss_curves(tmp_path, drawn):
    losses = {"dense": [3.0, 2.0, 1.0], "sparse": [3.0, 2.5, 0.5]}
    path = pictures.loss_curves(tmp_path / "new" / "loss.png", losses, "a small model")
    assert image(path).std() > 0
    above, below = drawn[0].axes
    assert [line.get_label() for line in above.lines] == ["dense", "sparse"]
    assert list(above.lines[1].get_ydata()) == losses["sparse"]
    assert list(below.lines[0].get_ydata()) == [0, 0.5, -0.5]
    assert below.get_xlabel() and above.get_ylabel() == "loss (nats per token)"


def test_pattern_shows_density_over_token_positions(tmp_path, drawn):
    density = np.tril(np.random.default_rng(0).random((8, 8)))
    path = pictures.pattern(tmp_path / "pattern.png", density, 512, "a head")
    assert image(path).std() > 0
    (shown,) = drawn[0].axes[0].images
    assert np.array_equal(shown.get_array().filled(0), density)
    assert shown.get_extent() == [0, 512, 512, 0]


@pytest.mark.parametrize("heads", [1, 3, 6])
def test_patterns_draws_every_head(tmp_path, drawn, heads):
    density = {f"head {head}": np.tri(4) for head in range(heads)}
    pictures.patterns(tmp_path / "patterns.png", density, 64, "heads")
    titles = [axes.get_title() for axes in drawn[0].axes if axes.get_title()]
    assert titles == [f"head {head}: density 100%" for head in range(heads)]


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_work_stacks_ring_steps(tmp_path, drawn, ranks):
    pairs = np.arange(1.0, ranks * ranks + 1).reshape(ranks, ranks)
    path = pictures.work(tmp_path / "work.png", pairs, 4 * pairs.sum(), "work")
    assert image(path).std() > 0
    axes = drawn[0].axes[0]
    heights = np.array([[bar.get_height() for bar in bars] for bars in axes.containers]).T
    assert heights == pytest.approx(100 * pairs / (4 * pairs.sum()))
    tops = [bar.get_y() + bar.get_height() for bar in axes.containers[-1]]
    assert tops == pytest.approx(heights.sum(1))


def test_recall_density_has_lines_for_mean_and_percentile_of_each_policy(tmp_path, drawn):
    curves = {
        "price": ([0.1, 0.2], [0.8, 0.9], [0.5, 0.7]),
        "fixed": ([0.05, 0.4], [0.7, 0.95], [0.2, 0.9]),
    }
    path = pictures.recall_density(tmp_path / "curves.png", curves, 0.9, "a model")
    assert image(path).std() > 0
    lines = drawn[0].axes[0].lines
    assert [list(line.get_ydata()) for line in lines[:4]] == [
        pytest.approx([80, 90]), pytest.approx([50, 70]),
        pytest.approx([70, 95]), pytest.approx([20, 90]),
    ]  # fmt: skip
    assert list(lines[2].get_xdata()) == pytest.approx([5, 40])
    assert list(lines[4].get_ydata()) == pytest.approx([90, 90])  # the target
    legend = [entry.get_text() for entry in drawn[0].axes[0].get_legend().get_texts()]
    assert legend == list(curves)


def test_recall_density_has_numbers_on_short_axes(tmp_path, drawn):
    curves = {"fixed": ([0.19, 0.6], [0.9, 0.95], [0.8, 0.9])}
    pictures.recall_density(tmp_path / "curves.png", curves, 0.9, "a model")
    axes = drawn[0].axes[0]
    low, high = axes.get_xlim()
    assert len([x for x in axes.get_xticks() if low <= x <= high]) >= 2


def test_layers_by_heads_crosses_out_what_is_not_finite(tmp_path, drawn):
    values = np.array([[0.1, np.inf, 0.3], [0.4, 0.5, 0.6]])
    path = pictures.layers_by_heads(tmp_path / "map.png", values, "a model", "density")
    assert image(path).std() > 0
    axes = drawn[0].axes[0]
    assert axes.images[0].get_array().mask.tolist() == [[False, True, False], [False] * 3]
    assert axes.lines[0].get_xydata().tolist() == [[1, 0]]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("head", "layer")


def test_attention_and_pattern_stand_side_by_side(tmp_path, drawn):
    rng = np.random.default_rng(0)
    mass, density = np.tril(rng.random((8, 8))), np.tril(rng.random((8, 8)))
    mass[3], density[3] = np.nan, np.nan  # a row without rows
    path = pictures.attention_and_pattern(tmp_path / "head.png", mass, density, 512, "a head")
    assert image(path).std() > 0
    left, right = (axes.images[0] for axes in drawn[0].axes[:2])
    assert np.array_equal(left.get_array().filled(0), np.nan_to_num(mass))
    assert np.array_equal(right.get_array().filled(0), np.nan_to_num(density))
    assert right.get_array().mask[3].all()  # grey, not "nothing kept"
    assert left.get_extent() == right.get_extent() == [0, 512, 512, 0]


def test_curves_have_the_colours_of_the_page():
    curves = {"price": ([0.1, 0.4], [0.8, 0.9], [0.6, 0.8])}
    draw = partial(pictures.recall_density, curves=curves, target=0.9, title="")
    for theme, picture in svg_by_theme(draw).items():
        assert [COLOURS[each][0] in picture for each in COLOURS] == [
            each == theme for each in COLOURS
        ]
