"""Pieces of a self-contained HTML page: no script, no link, nothing that is fetched."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from html import escape

_CSS = """
:root { --ink: #1f2933; --soft: #55606c; --rule: #dde3e9; --paper: #fff; --ground: #f5f7f9;
  --blue: #0072b2; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .2em; letter-spacing: -.01em; }
h2 { font-size: 1.2rem; margin: 0 0 .6em; }
h3 { font-size: 1rem; margin: 1.4em 0 .4em; }
p { margin: 0 0 .8em; max-width: 46em; }
.kicker { max-width: none; overflow-wrap: anywhere; }
.kicker, .note, figcaption { color: var(--soft); font-size: .86rem; }
.lead { font-size: 1.06rem; }
section { background: var(--paper); border: 1px solid var(--rule); border-radius: 10px;
  padding: 22px 24px; margin-top: 20px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(176px, 1fr)); gap: 12px;
  margin: 22px 0 0; }
.card { background: var(--paper); border: 1px solid var(--rule); border-radius: 10px;
  padding: 14px 16px; }
.card .label { color: var(--soft); font-size: .84rem; }
.card .value { font-size: 1.5rem; font-weight: 650; line-height: 1.35; white-space: nowrap; }
.card .detail { color: var(--soft); font-size: .84rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 12px; border-bottom: 1px solid var(--rule); text-align: right;
  white-space: nowrap; font-size: .93rem; }
thead th { color: var(--soft); font-weight: 600; border-bottom: 2px solid var(--rule); }
th:first-child { text-align: left; padding-left: 0; }
tbody th { font-weight: 500; }
.note { margin: .7em 0 0; overflow-wrap: anywhere; max-width: none; }
figure { margin: 14px 0 0; }
figure .scroll svg { display: block; width: 100%; min-width: 600px; max-width: 860px; height: auto;
  margin: 0 auto; }
figcaption { margin-top: .5em; max-width: 54em; }
.turn { border-top: 1px solid var(--rule); padding: 12px 0; }
.action { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: .9rem; margin-bottom: 6px; }
.action b { color: var(--blue); }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 16px; }
.side { font-size: .92rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.side .who { display: block; color: var(--soft); font-size: .76rem; text-transform: uppercase;
  letter-spacing: .05em; }
mark { background: #fbdcc4; color: inherit; border-radius: 3px; padding: 0 2px; }
pre { background: var(--ground); border: 1px solid var(--rule); border-radius: 8px; padding: 12px;
  overflow-x: auto; font-size: .84rem; line-height: 1.5; margin: 0; }
details { margin-top: 14px; } summary { cursor: pointer; color: var(--blue); }
@media (max-width: 640px) { main { padding: 20px 12px 40px; } section { padding: 16px 14px; }
  .pair { grid-template-columns: 1fr; gap: 8px; } th, td { padding: 6px 8px; } }
@media print { body { background: #fff; } section, .card { break-inside: avoid; } }
"""


@dataclass(frozen=True)
class Card:
    """A headline number."""

    label: str
    value: str
    detail: str


def page(title: str, body: str) -> str:
    """A whole document around ready HTML."""
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{_CSS}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A titled box of ready HTML parts."""
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def paragraph(text: str, kind: str = "") -> str:
    """Escaped text; `kind` is a class of the style sheet: lead, kicker, note."""
    return f"<p class='{kind}'>{escape(text)}</p>" if kind else f"<p>{escape(text)}</p>"


def cards(items: Sequence[Card]) -> str:
    """Headline numbers in a grid that wraps."""
    return "<div class='cards'>" + "".join(map(_card, items)) + "</div>"


def figure(svg: str, caption: str) -> str:
    """An inline picture that keeps a readable size on a phone by scrolling sideways."""
    caption = escape(caption)
    return f"<figure><div class='scroll'>{svg}</div><figcaption>{caption}</figcaption></figure>"


def preformatted(text: str) -> str:
    """Commands or a configuration, as they are typed."""
    return f"<pre>{escape(text)}</pre>"


def folded(summary: str, *parts: str) -> str:
    """Ready HTML that the reader opens with a click."""
    return f"<details><summary>{escape(summary)}</summary>{''.join(parts)}</details>"


def side_by_side(heading: str, left: tuple[str, str], right: tuple[str, str]) -> str:
    """Two (name, text) columns under a heading, with the words that differ marked in both."""
    marked = mark_differences(left[1], right[1])
    columns = "".join(
        f"<div class='side'><span class='who'>{escape(name)}</span>{text}</div>"
        for (name, _), text in zip((left, right), marked, strict=True)
    )
    return (
        f"<div class='turn'><div class='action'><b>&gt;</b> {escape(heading)}</div>"
        f"<div class='pair'>{columns}</div></div>"
    )


def mark_differences(left: str, right: str) -> tuple[str, str]:
    """Both texts escaped, each run of words that the other lacks inside `<mark>`."""
    a, b = _words(left), _words(right)
    marked: tuple[list[str], list[str]] = ([], [])
    for tag, a0, a1, b0, b1 in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        for out, words in zip(marked, (a[a0:a1], b[b0:b1]), strict=True):
            text = escape("".join(words))
            out.append(f"<mark>{text}</mark>" if text and tag != "equal" else text)
    return "".join(marked[0]), "".join(marked[1])


def _words(text: str) -> list[str]:
    """Words and the white space between them, so that joining them gives the text back."""
    return re.findall(r"\s+|\S+", text)


def _card(card: Card) -> str:
    return (
        f"<div class='card'><div class='label'>{escape(card.label)}</div>"
        f"<div class='value'>{escape(card.value)}</div>"
        f"<div class='detail'>{escape(card.detail)}</div></div>"
    )
