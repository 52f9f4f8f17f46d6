"""Figures as inline SVG: learning curves, bars with intervals, the order of unmasking.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; curves differ in line
style too. Nothing here touches matplotlib's global state, so no display is needed.
"""

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#7a7f87"
_INK, _RULE = "#1f2933", "#d9dee4"
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "svg.fonttype": "none",  # text stays text: the browser's fonts know Chinese and emoji
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": "#9aa3ad",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _RULE,
    "grid.linewidth": 0.7,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "svg.hashsalt": "mdlm_jax",  # the same figure is the same text, run after run
}
_LINES = {
    "solid": {"linewidth": 2.0},
    "dashed": {"linewidth": 2.0, "linestyle": (0, (5, 2))},
    "faint": {"linewidth": 1.0, "alpha": 0.35},
    "points": {"linewidth": 1.4, "marker": "o", "markersize": 5.5},
}


@dataclass(frozen=True)
class Series:
    """One labelled curve."""

    label: str  # "" keeps the curve out of the legend
    x: Sequence[float]
    y: Sequence[float]
    color: str = BLUE
    style: str = "solid"  # a key of _LINES


@dataclass(frozen=True)
class Bars:
    """One colour of a bar chart: a value and an interval for each group."""

    label: str
    values: Sequence[float]
    intervals: Sequence[tuple[float, float]]  # (low, high), each around its value
    color: str = BLUE


def learning_curves(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    log_y: bool = False,
    y_range: tuple[float, float] | None = None,
) -> str:
    """Several curves on one axis, as SVG text. Raises ValueError for an unknown style."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(7.6, 3.6)
        for one in series:
            if one.style not in _LINES:
                raise ValueError(f"style {one.style!r} is not one of {', '.join(_LINES)}")
            label = one.label or "_nolegend_"
            axes.plot(one.x, one.y, color=one.color, label=label, **_LINES[one.style])
        axes.set(xlabel=x_label, ylabel=y_label)
        axes.margins(x=0.01)
        if log_y:
            _log_scale(axes)
        if y_range:
            axes.set_ylim(*y_range)
        _legend(axes, columns=len(series))
        return _svg(figure)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Each value's mean with the `width - 1` values before it, as far as there are any."""
    windows = (values[max(0, end - width) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def bar_chart(
    groups: Sequence[str],
    bars: Sequence[Bars],
    *,
    y_label: str,
    y_range: tuple[float, float] = (0.0, 1.0),
    percent: bool = False,
) -> str:
    """Bars side by side in each group, with their intervals as whiskers, as SVG text."""
    width = 0.72 / len(bars)
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(7.6, 3.4)
        for place, one in enumerate(bars):
            centres = [g + (place - (len(bars) - 1) / 2) * width for g in range(len(groups))]
            _draw_bars(axes, centres, one, width * 0.9, percent)
        axes.set(ylabel=y_label, ylim=y_range)
        axes.set_xticks(range(len(groups)), groups)
        axes.grid(visible=False, axis="x")
        axes.tick_params(axis="x", length=0)
        if percent:
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.0f}%"))
        _legend(axes, columns=len(bars))
        return _svg(figure)


def unmasking_order(
    tokens: Sequence[str], order: Sequence[int], *, block_length: int, block_offset: int = 0
) -> str:
    """The tokens as a grid of boxes, dark where filled early and pale where filled late, as SVG.

    Args:
      tokens: the observation's tokens, in reading order.
      order: 1-based pass that filled each token; printed in its box.
      block_length: tokens denoised together; a frame is drawn around each block.
      block_offset: place of the first token inside its block (earlier places belong to the
        prompt and are drawn as empty outlines).

    Raises ValueError for no tokens, unequal lengths, a pass below 1 or an offset outside a block.
    """
    _check_order(tokens, order, block_length, block_offset)
    columns = _columns(block_length)
    rows = -(-(block_offset + len(tokens)) // columns)
    passes = max(order)
    colours = _ramp(passes)
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(8.4, 0.9 + 0.52 * rows)
        cell_points = 72 * 7.4 / columns
        for place in range(block_offset):
            _draw_box(axes, place, columns, face="none", edge=_RULE, dashed=True)
        for index, (token, at) in enumerate(zip(tokens, order, strict=True)):
            face = colours(at - 1)
            _draw_box(axes, block_offset + index, columns, face=face, edge="white")
            _draw_token(axes, block_offset + index, columns, token, at, face, cell_points)
        _draw_blocks(axes, block_offset + len(tokens), columns, block_length)
        axes.set(xlim=(-0.08, columns + 0.08), ylim=(rows + 0.08, -0.08))
        axes.axis("off")
        _pass_bar(figure, axes, colours, passes)
        return _svg(figure)


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of that many inches; without pyplot no backend and no global list is involved."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _svg(figure: Figure) -> str:
    """The figure as an `<svg>` element with neither XML header nor metadata, to be set in HTML."""
    out = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from font")
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    text = out.getvalue()
    return text[text.index("<svg") :]


def _legend(axes: Axes, columns: int) -> None:
    """Above the plot, so that it never covers a curve."""
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=min(columns, 4), borderaxespad=0.2
        )


def _log_scale(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_bars(
    axes: Axes, centres: Sequence[float], bars: Bars, width: float, percent: bool
) -> None:
    # Rounding can put an end of a narrow interval a hair on the wrong side of its value.
    below = [max(0.0, v - low) for v, (low, _) in zip(bars.values, bars.intervals, strict=True)]
    above = [max(0.0, high - v) for v, (_, high) in zip(bars.values, bars.intervals, strict=True)]
    axes.bar(centres, bars.values, width, color=bars.color, label=bars.label)
    axes.errorbar(centres, bars.values, (below, above), fmt="none", ecolor=_INK, capsize=4)
    for centre, value, up in zip(centres, bars.values, above, strict=True):
        text = f"{100 * value:.0f}%" if percent else f"{value:.2f}"
        axes.annotate(
            text,
            (centre, value + up),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            fontsize=9.5,
        )


def _check_order(
    tokens: Sequence[str], order: Sequence[int], block_length: int, block_offset: int
) -> None:
    if not tokens or len(tokens) != len(order):
        raise ValueError(f"{len(tokens)} tokens with {len(order)} passes; need as many, at least 1")
    if min(order) < 1:
        raise ValueError(f"passes are counted from 1, got {min(order)}")
    if not 0 <= block_offset < block_length:
        raise ValueError(f"offset {block_offset} is outside a block of {block_length}")


def _columns(block_length: int) -> int:
    """Whole blocks per row, eight tokens or a little more; a very long block is broken."""
    return min(block_length * max(1, 8 // block_length), 16)


def _ramp(passes: int) -> ListedColormap:
    """One hue from dark (first pass) to pale (last): order stays visible in grey, too."""
    blues = matplotlib.colormaps["Blues"]
    steps = max(passes - 1, 1)
    return ListedColormap([blues(0.88 - 0.78 * p / steps) for p in range(passes)])


def _draw_box(
    axes: Axes, place: int, columns: int, *, face: object, edge: str, dashed: bool = False
) -> None:
    row, column = divmod(place, columns)
    box = FancyBboxPatch(
        (column + 0.05, row + 0.08),
        0.90,
        0.84,
        boxstyle="round,pad=0,rounding_size=0.06",
        mutation_aspect=2.0,
        facecolor=face,
        edgecolor=edge,
        linestyle=(0, (3, 3)) if dashed else "solid",
        linewidth=0.9,
    )
    axes.add_patch(box)


def _draw_token(
    axes: Axes,
    place: int,
    columns: int,
    token: str,
    at: int,
    face: tuple[float, ...],
    cell_points: float,
) -> None:
    row, column = divmod(place, columns)
    red, green, blue, _ = face
    ink = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.6 else _INK
    text, size = _fitted(token, cell_points)
    axes.text(
        column + 0.5,
        row + 0.43,
        text,
        size=size,
        color=ink,
        ha="center",
        va="center",
        parse_math=False,
    )
    axes.text(column + 0.90, row + 0.86, str(at), size=6.8, color=ink, ha="right", va="baseline")


def _fitted(token: str, cell_points: float) -> tuple[str, float]:
    """The token with its white space made visible, and a font size at which it fits its box."""
    text = token
    for old, new in ((" ", "·"), ("Ġ", "·"), ("\n", "↵"), ("Ċ", "↵"), ("\t", "⇥")):
        text = text.replace(old, new)
    longest = max(1, int(cell_points * 0.86 / (0.62 * 6.0)))  # characters at the smallest size
    if len(text) > longest:
        text = text[: longest - 1] + "…"
    return text, min(10.5, cell_points * 0.86 / (0.62 * max(len(text), 1)))


def _draw_blocks(axes: Axes, end: int, columns: int, block_length: int) -> None:
    """A frame around every block; a block that is broken over rows gets one frame per row."""
    starts = sorted({*range(0, end, block_length), *range(0, end, columns)})
    for start, stop in zip(starts, [*starts[1:], end], strict=True):
        row, column = divmod(start, columns)
        frame = FancyBboxPatch(
            (column + 0.01, row + 0.02),
            stop - start - 0.02,
            0.96,
            boxstyle="round,pad=0,rounding_size=0.08",
            mutation_aspect=2.0,
            facecolor="none",
            edgecolor="#6b7580",
            linewidth=1.1,
        )
        axes.add_patch(frame)


def _pass_bar(figure: Figure, axes: Axes, colours: ListedColormap, passes: int) -> None:
    """The key to the colours: one step per pass."""
    norm = BoundaryNorm([p + 0.5 for p in range(passes + 1)], passes)
    mappable = matplotlib.cm.ScalarMappable(norm, colours)
    bar = figure.colorbar(
        mappable, ax=axes, location="bottom", aspect=45, shrink=0.6, pad=0.03, fraction=0.06
    )
    step = -(-passes // 12)
    bar.set_ticks(range(1, passes + 1, step))
    bar.minorticks_off()
    bar.ax.tick_params(length=0, labelsize=9)
    bar.outline.set_visible(False)
    bar.set_label("pass that filled the token (dark: early)", fontsize=9)
