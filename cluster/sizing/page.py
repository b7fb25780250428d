"""A self-contained HTML page: sections of paragraphs, tables, code and pictures. Nothing is loaded from anywhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

STYLE = (
    ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:1060px;margin:2rem auto;"
    "padding:0 1rem}h1{font-size:1.6rem}h2{font-size:1.2rem;margin-top:2rem}.wide{overflow-x:auto}"
    "table{border-collapse:collapse;margin:1rem 0}th,td{padding:.25rem .75rem;border-bottom:1px solid #8884;"
    "text-align:right;font-variant-numeric:tabular-nums}th:first-child,td:first-child{text-align:left}td{white-space:nowrap}"
    "pre{padding:1rem;border:1px solid #8884;overflow-x:auto}"
)


@dataclass(frozen=True)
class Table:
    header: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass(frozen=True)
class Code:
    text: str


@dataclass(frozen=True)
class Picture:
    svg: str  # of our own making: it goes into the page as it is


Part = str | Table | Code | Picture  # a str is one paragraph


@dataclass(frozen=True)
class Section:
    title: str
    parts: Sequence[Part]


def page(title: str, sections: Sequence[Section], lead: str = "") -> str:
    """Return the page; every text in it is escaped."""
    body = "".join(
        f"<section><h2>{escape(section.title)}</h2>{''.join(_part(part) for part in section.parts)}</section>\n"
        for section in sections
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{STYLE}</style></head>\n<body><h1>{escape(title)}</h1>"
        f"{f'<p>{escape(lead)}</p>' if lead else ''}\n{body}</body></html>\n"
    )


def _part(part: Part) -> str:
    if isinstance(part, Table):
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in part.header)
        rows = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in part.rows)
        return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    if isinstance(part, Code):
        return f"<pre>{escape(part.text)}</pre>"
    if isinstance(part, Picture):
        return f'<div class="wide">{part.svg}</div>'
    return f"<p>{escape(part)}</p>"
