"""metrics/: scores, intervals, tables, pictures and pages."""

from xml.etree import ElementTree

import numpy as np
import pytest

from mdlm_jax.metrics import page, pictures
from mdlm_jax.metrics.interval import bootstrap, paired_difference
from mdlm_jax.metrics.tables import Table, as_html, as_markdown, as_text, brackets, duration
from mdlm_jax.metrics.text import bleu1, exact_match, rouge_l
from mdlm_jax.metrics.unmasking import inversions, passes_in_block

# ---------------------------------------------------------------------------------------- text


def test_exact_match_is_per_item_and_in_the_mean():
    score = exact_match(["a", "b ", "", "A"], ["a", "b", "", "a"])
    assert score.per_item == (1.0, 0.0, 1.0, 0.0)
    assert score.value == 0.5


def test_bleu1_by_hand():
    # 3 of 4 tokens match, the prediction is not shorter: no brevity penalty.
    assert bleu1(["you see a cup"], ["you see a mug"]).value == pytest.approx(75.0)
    # All 2 tokens match, c = 2, r = 4: 100 exp(1 - 4 / 2).
    assert bleu1(["you see"], ["you see a mug"]).value == pytest.approx(100 * np.exp(-1))


def test_bleu1_is_of_the_corpus_and_a_perfect_score_is_100():
    assert bleu1(["a b c", "d"], ["a b c", "d"]).value == 100.0
    # An empty prediction adds its reference's length: c = 3, r = 4.
    assert bleu1(["a b c", ""], ["a b c", "d"]).value == pytest.approx(100 * np.exp(1 - 4 / 3))


def test_rouge_l_by_hand():
    # LCS "you see cup" 3, prediction 4 tokens, reference 3: P 3/4, R 1, F 6/7.
    score = rouge_l(["You see, a cup!", ""], ["you see cup", ""])
    assert score.per_item == pytest.approx((6 / 7, 0.0))
    assert score.value == pytest.approx(3 / 7)


@pytest.mark.parametrize("metric", [exact_match, bleu1, rouge_l])
def test_text_metrics_refuse_nothing_and_unequal_lists(metric):
    with pytest.raises(ValueError, match="no pairs"):
        metric([], [])
    with pytest.raises(ValueError, match="1 predictions but 2 references"):
        metric(["a"], ["a", "b"])


@pytest.mark.parametrize("metric", [exact_match, bleu1, rouge_l])
def test_every_score_names_its_settings(metric):
    score = metric(["a cup"], ["a mug"])
    assert score.name == metric.__name__
    assert score.settings


# ------------------------------------------------------------------------------------ interval


def test_bootstrap_is_close_to_the_normal_interval_and_deterministic():
    values = np.random.default_rng(0).random(400) < 0.7
    low, high = bootstrap(values, resamples=4000, seed=1)
    error = 1.96 * np.sqrt(values.mean() * (1 - values.mean()) / values.size)
    assert low == pytest.approx(values.mean() - error, abs=0.006)
    assert high == pytest.approx(values.mean() + error, abs=0.006)
    assert (low, high) == bootstrap(values, resamples=4000, seed=1)


def test_bootstrap_draws_follow_from_the_seed():
    values = np.random.default_rng(0).random(30)
    assert bootstrap(values, resamples=50, seed=1) != bootstrap(values, resamples=50, seed=2)


def test_bootstrap_covers_the_true_mean_as_often_as_it_says():
    random = np.random.default_rng(3)
    hits = 0
    for seed in range(200):
        low, high = bootstrap(random.random(60), resamples=300, seed=seed, level=0.9)
        hits += low <= 0.5 <= high
    assert 0.83 <= hits / 200 <= 0.96


def test_bootstrap_of_one_value_or_equal_values_is_a_point():
    assert bootstrap([0.25], resamples=10, seed=0) == (0.25, 0.25)
    assert bootstrap([1.0] * 5, resamples=10, seed=0) == (1.0, 1.0)


def test_bootstrap_pieces_do_not_change_the_result(monkeypatch):
    values = np.random.default_rng(0).random(30)
    whole = bootstrap(values, resamples=500, seed=5)
    monkeypatch.setattr("mdlm_jax.metrics.interval._DRAWS_AT_ONCE", 100)
    assert bootstrap(values, resamples=500, seed=5) == whole


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ([], {}, "at least one value"),
        ([1.0, float("nan")], {}, "finite"),
        ([1.0], {"resamples": 0}, "resamples"),
        ([1.0], {"level": 1.0}, "level"),
    ],
)
def test_bootstrap_refuses_what_has_no_interval(values, options, message):
    with pytest.raises(ValueError, match=message):
        bootstrap(values, **{"resamples": 10, "seed": 0, **options})


def test_paired_difference_is_after_minus_before_and_uses_the_pairs():
    before = np.random.default_rng(0).random(50)
    difference, low, high = paired_difference(before, before + 0.1, resamples=200, seed=0)
    assert (difference, low, high) == pytest.approx((0.1, 0.1, 0.1))
    with pytest.raises(ValueError, match="equal lengths"):
        paired_difference([1.0], [1.0, 0.0], resamples=10, seed=0)


# -------------------------------------------------------------------------------------- tables

TABLE = Table(("system", "match"), (("a|b", "1.0"), ("<longer>", "12.5")), note="of 4")


def test_text_table_is_aligned():
    assert as_text(TABLE) == (
        "system    match\n--------  -----\na|b         1.0\n<longer>   12.5\nof 4"
    )


def test_markdown_table_escapes_pipes():
    assert as_markdown(TABLE) == (
        "| system | match |\n| :-- | --: |\n| a\\|b | 1.0 |\n| <longer> | 12.5 |\n\nof 4"
    )


def test_html_table_escapes_cells_and_is_well_formed():
    root = ElementTree.fromstring(f"<div>{as_html(TABLE)}</div>")
    assert [cell.text for cell in root.iter("td")] == ["1.0", "12.5"]
    assert "&lt;longer&gt;" in as_html(TABLE)


def test_table_refuses_a_ragged_row():
    with pytest.raises(ValueError, match="2 columns, but a row has 1"):
        Table(("a", "b"), (("x",),))


def test_numbers_are_written_for_readers():
    assert brackets((0.08, 0.3)) == "[8.0, 30.0]"
    assert brackets((-0.08, 0.3), signed=True) == "[-8.0, +30.0]"
    assert [duration(s) for s in (9, 62, 59.6, 3725)] == [
        "9 s",
        "1 min 02 s",
        "1 min 00 s",
        "1 h 02 min",
    ]


# ----------------------------------------------------------------------------------- unmasking


def test_passes_are_counted_inside_blocks():
    # Blocks of 4 with two places before the text: tokens 0, 1 | 2, 3, 4, 5.
    order = [2, 1, 4, 3, 5, 7]
    assert passes_in_block(order, 4, 2) == [2, 1, 2, 1, 3, 5]


def test_inversions_are_counted_inside_blocks():
    assert inversions([2, 1, 4, 3, 5, 7], 4, 2) == 2
    assert inversions([1, 1, 2, 3], 2) == 0
    assert inversions([4, 3, 2, 1], 4) == 6


# ------------------------------------------------------------------------------------ pictures


def _texts(svg: str) -> list[str]:
    """What is written in the picture."""
    return [part.text for part in ElementTree.fromstring(svg).iter() if part.tag.endswith("text")]


def test_unmasking_order_shows_every_token_and_its_pass():
    tokens = ["You", " see", " a", " $mug$", "\n"]
    svg = pictures.unmasking_order(tokens, [1, 2, 1, 3, 1], block_length=4, block_offset=2)
    texts = _texts(svg)
    assert all(shown in texts for shown in ("You", "·see", "·a", "·$mug$", "↵", "1", "2", "3"))
    ElementTree.fromstring(svg)


def test_unmasking_order_leaves_signs_that_matplotlib_s_font_lacks_to_the_browser(recwarn):
    svg = pictures.unmasking_order(["你好", "🙂", "a"], [1, 2, 1], block_length=4)
    assert "你好" in svg
    assert "🙂" in svg
    assert not recwarn.list


@pytest.mark.parametrize("block_length", [1, 3, 8, 32])
def test_unmasking_order_takes_any_block_length(block_length):
    tokens = [f" token{i}" for i in range(70)]
    svg = pictures.unmasking_order(tokens, range(1, 71), block_length=block_length)
    assert svg.startswith("<svg")


@pytest.mark.parametrize(
    ("tokens", "order", "offset", "message"),
    [
        ([], [], 0, "at least 1"),
        (["a"], [1, 2], 0, "1 tokens with 2 passes"),
        (["a"], [0], 0, "counted from 1"),
        (["a"], [1], 4, "outside a block"),
    ],
)
def test_unmasking_order_refuses_what_it_cannot_draw(tokens, order, offset, message):
    with pytest.raises(ValueError, match=message):
        pictures.unmasking_order(tokens, order, block_length=4, block_offset=offset)


def test_learning_curves_and_bars_are_well_formed_and_repeatable():
    curves = [
        pictures.Series("train", [0, 1, 2], [3.0, 2.0, 1.0], style="faint"),
        pictures.Series("dev", [0, 2], [3.0, 1.5], pictures.ORANGE, "points"),
    ]

    def draw() -> str:
        return pictures.learning_curves(curves, x_label="update", y_label="loss", log_y=True)

    assert draw() == draw()
    assert "dev" in _texts(draw())
    bars = [pictures.Bars("real", [0.4, 0.6], [(0.3, 0.5), (0.5, 0.7)])]
    svg = pictures.bar_chart(["before", "after"], bars, y_label="success", percent=True)
    assert {"before", "after", "40%", "60%"} <= set(_texts(svg))
    ElementTree.fromstring(svg)


def test_an_interval_a_hair_beside_its_value_is_drawn():
    bars = [pictures.Bars("real", [0.3], [(0.1 + 0.2, 0.4)])]
    assert pictures.bar_chart(["before"], bars, y_label="success").startswith("<svg")


def test_running_mean_looks_back():
    assert pictures.running_mean([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]


def test_learning_curves_refuse_an_unknown_style():
    with pytest.raises(ValueError, match="solid"):
        pictures.learning_curves(
            [pictures.Series("a", [0], [1], style="wavy")], x_label="x", y_label="y"
        )


# ----------------------------------------------------------------------------------------- page


def test_differences_are_marked_on_both_sides_and_escaped():
    left, right = page.mark_differences("a <cup> here", "a mug here now")
    assert left == "a <mark>&lt;cup&gt;</mark> here"
    assert right == "a <mark>mug</mark> here<mark> now</mark>"
    assert page.mark_differences("same  text\n", "same  text\n") == ("same  text\n",) * 2


def test_page_fetches_nothing():
    html = page.page("t", page.section("s", page.cards([page.Card("a", "1", "b")])))
    assert "<script" not in html
    assert "<link" not in html
    assert "url(" not in html


def test_bootstrap_draws_whole_cases():
    """Turns of one game stand or fall together: the interval is that of the games."""
    games = np.random.default_rng(0).integers(2, size=40).astype(float)
    turns, names = np.repeat(games, 5), np.repeat(np.arange(40), 5)
    draws = {"resamples": 500, "seed": 3}
    whole = bootstrap(turns, groups=list(names), **draws)
    assert whole == pytest.approx(bootstrap(games, **draws))
    low, high = bootstrap(turns, **draws)
    assert whole[1] - whole[0] > 1.5 * (high - low)
    with pytest.raises(ValueError, match="as many groups"):
        bootstrap(turns, groups=[1], **draws)
