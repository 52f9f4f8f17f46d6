"""One table, three renderings: aligned plain text, Markdown and HTML."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Table:
    """Cells are ready strings. The first column is left aligned, the others right aligned."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""  # settings and units; printed under the table

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(f"{len(self.header)} columns, but a row has {len(row)}: {row}")


def as_text(table: Table) -> str:
    """Columns padded to their widest cell, a rule under the header, the note below."""
    widths = [max(map(len, column)) for column in zip(table.header, *table.rows, strict=True)]
    lines = [_padded(table.header, widths), "  ".join("-" * width for width in widths)]
    lines += [_padded(row, widths) for row in table.rows]
    return "\n".join([*lines, table.note] if table.note else lines)


def as_markdown(table: Table) -> str:
    """A GitHub-flavoured pipe table; the note follows as a paragraph."""
    lines = [_piped(table.header), _piped([":--"] + ["--:"] * (len(table.header) - 1))]
    lines += [_piped([cell.replace("|", "\\|") for cell in row]) for row in table.rows]
    return "\n".join([*lines, "", table.note] if table.note else lines)


def as_html(table: Table) -> str:
    """A `<table>` inside a box that scrolls sideways on narrow screens; every cell is escaped."""
    head = "".join(f"<th scope='col'>{escape(cell)}</th>" for cell in table.header)
    body = "".join(_html_row(row) for row in table.rows)
    note = f"<p class='note'>{escape(table.note)}</p>" if table.note else ""
    return (
        f"<div class='scroll'><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>{note}"
    )


def percent(share: float, digits: int = 1) -> str:
    """0.615 -> "61.5%"."""
    return f"{100 * share:.{digits}f}%"


def points(difference: float) -> str:
    """A difference of shares: 0.19 -> "+19.0 points"."""
    return f"{100 * difference:+.1f} points"


def brackets(interval: Sequence[float], *, signed: bool = False) -> str:
    """An interval of shares in percent: (0.08, 0.3) -> "[8.0, 30.0]", signed "[+8.0, +30.0]"."""
    low, high = (100 * end for end in interval)
    return f"[{low:+.1f}, {high:+.1f}]" if signed else f"[{low:.1f}, {high:.1f}]"


def duration(seconds: float) -> str:
    """62 -> "1 min 02 s", 3725 -> "1 h 02 min", 9 -> "9 s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _padded(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    padded = [first[0].ljust(first[1])] + [cell.rjust(width) for cell, width in others]
    return "  ".join(padded).rstrip()


def _piped(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _html_row(row: Sequence[str]) -> str:
    cells = "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
    return f"<tr><th scope='row'>{escape(row[0])}</th>{cells}</tr>"
