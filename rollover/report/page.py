"""One self-contained HTML page: text, styles, figures and Plotly in a single file that loads nothing.

Everything passed as text is escaped here; only the names of this package's own elements go in raw.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import os
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from rollover.privacy import make_private
from rollover.report.plot import Figure


class Page:
    """Collects sections top to bottom, and the figures they show."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._body: list[str] = []
        self._figures: dict[str, list[Figure]] = {}

    def add(self, fragment: str) -> None:
        """Append ready-made HTML: what the functions of this module return."""
        self._body.append(fragment)

    def section(self, title: str, caption: str, *cards: str, layout: str = "grid") -> None:
        inner = "\n".join(cards)
        self.add(
            f'<section><h2>{escape(title)}</h2><p class="caption">{escape(caption)}</p>'
            f'<div class="{layout}">{inner}</div></section>'
        )

    def figure(
        self,
        title: str,
        drawn: Figure | Sequence[Figure] | None,
        missing: str,
        *,
        labels: Sequence[str] = (),
        pressed: int = 0,
    ) -> str:
        """Return a card with a figure, or with ``missing`` when there is none; of several variants, buttons with
        ``labels`` choose the figure that is shown."""
        heading = f"<h3>{escape(title)}</h3>" if title else ""
        variants = [drawn] if isinstance(drawn, dict) else list(drawn or ())
        if not variants:
            return f'<div class="card">{heading}<p class="empty">{escape(missing)}</p></div>'
        name = f"figure-{len(self._figures)}"
        self._figures[name] = variants
        height = max(v["layout"]["height"] for v in variants)
        for variant in variants:
            variant["layout"]["height"] = height
        buttons = _choices(name, labels, pressed) if len(variants) > 1 else ""
        return f'<div class="card">{heading}{buttons}<div id="{name}" style="min-height:{height}px"></div></div>'

    def render(self, *, is_live: bool = False) -> str:
        """Return the page. ``is_live``: it asks its server for a newer one now and then."""
        assets = resources.files("rollover.report") / "assets"
        return Template((assets / "page.html").read_text(encoding="utf-8")).substitute(
            title=escape(self._title),
            css=(assets / "page.css").read_text(encoding="utf-8"),
            body="\n".join(self._body),
            figures=packed(json.dumps(finite(self._figures), separators=(",", ":"), allow_nan=False).encode()),
            plotly=_packed_plotly(),
            connections="'self'" if is_live else "'none'",
            live=" data-live" if is_live else "",
            script=(assets / "page.js").read_text(encoding="utf-8"),
        )


def packed(content: bytes) -> str:
    """Return what the page unpacks, as text that is shorter and can stand inside a script element."""
    return base64.b64encode(gzip.compress(content, mtime=0)).decode()


@cache
def _packed_plotly() -> str:
    return packed((resources.files("rollover.report") / "assets" / "plotly-basic.min.js").read_bytes())


def write_page(path: Path, text: str, *, private: bool = False) -> Path:
    """Replace ``path`` in one move, so that a reader never sees half a page; a link leads to the new one.
    ``private``: for its owner alone."""
    target = path.resolve()
    part = target.with_name(target.name + ".part")
    if private:
        make_private(part)
    part.write_text(text, encoding="utf-8")
    os.replace(part, target)
    return path


def finite(value: Any) -> Any:
    """Return ``value`` as JSON can hold it: it has no infinity and no NaN, so they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


def header(eyebrow: str, title: str, facts: Iterable[str]) -> str:
    return (
        f'<header><p class="eyebrow">{escape(eyebrow)}</p><h1>{escape(title)}</h1>'
        f'<p class="facts">{" · ".join(escape(f) for f in facts)}</p></header>'
    )


def alarm_list(alarms: Sequence[str]) -> str:
    """Draw the alarms of a run as a list; nothing without alarms."""
    items = "".join(f"<li>{escape(alarm)}</li>" for alarm in alarms)
    return f'<ul class="card alarms" role="alert">{items}</ul>' if items else ""


def tiles(entries: Iterable[tuple[str, str, str, str]]) -> str:
    """Draw one tile for each (label, value, unit, note)."""
    cells = "\n".join(
        f'<div class="card tile"><div class="label">{escape(label)}</div>'
        f'<div class="value">{escape(value)} <small>{escape(unit)}</small></div>'
        f'<div class="note">{escape(note)}</div></div>'
        for label, value, unit, note in entries
    )
    return f'<div class="tiles">{cells}</div>'


def _choices(figure: str, labels: Sequence[str], pressed: int) -> str:
    """Draw buttons that switch a figure to one of its variants."""
    buttons = "".join(
        f'<button type="button" data-figures="{figure}" data-variant="{i}"'
        f' aria-pressed="{"true" if i == pressed else "false"}">{escape(label)}</button>'
        for i, label in enumerate(labels)
    )
    return f'<div class="choices">{buttons}</div>'


def fate_bar(parts: Sequence[tuple[str, str, int]]) -> str:
    """Draw one bar whose parts, (name, colour variable, tokens), add up to everything that was decoded."""
    total = sum(n for _, _, n in parts) or 1
    bar = "".join(
        f'<span style="flex:{n} 0 0;background:var({colour})" title="{escape(name)}: {n:,}"></span>'
        for name, colour, n in parts
        if n
    )
    keys = "".join(
        f'<div><i style="background:var({colour})"></i>{escape(name)}</div><b>{n:,}</b><span>{n / total:.1%}</span>'
        for name, colour, n in parts
    )
    return f'<div class="fate" role="img" aria-label="tokens by fate">{bar}</div><div class="keys">{keys}</div>'


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Draw a table; the first cell of a row is its heading."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr><th>{escape(first)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in rest)}</tr>"
        for first, *rest in rows
    )
    top = f"<thead><tr>{top}</tr></thead>" if head else ""
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def details(title: str, content: str) -> str:
    return f'<details class="card"><summary>{escape(title)}</summary><div>{content}</div></details>'


def preformatted(value: Any) -> str:
    """Show a nested mapping as readable JSON."""
    return f"<pre>{escape(json.dumps(value, indent=2, ensure_ascii=False, default=str))}</pre>"
