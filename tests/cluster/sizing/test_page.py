"""The HTML page: complete by itself, and nothing that was put into it becomes markup."""

from html.parser import HTMLParser

from twinpool.cluster.sizing.charts import LineChart, Series
from twinpool.cluster.sizing.page import Code, Picture, Section, Table, page

HOSTILE = '<img src="https://example.com/x.png" onerror="alert(1)">&amp;'
VOID = {"meta", "img", "link"}


class Reader(HTMLParser):
    """Collects the texts and tags of a page, and checks that its tags are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open, self.tags, self.texts = list[str](), list[str](), list[str]()
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not {name for name, _ in attrs} & {"src", "href", "onerror", "onload"}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_every_text_is_escaped_and_nothing_is_loaded() -> None:
    chart = Picture(LineChart(HOSTILE, "x", "y", [Series(HOSTILE, [(1, 2)])]).svg())
    parts = [HOSTILE, Table([HOSTILE], [[HOSTILE], [3.5]]), Code(HOSTILE), chart]
    html = page(HOSTILE, [Section(HOSTILE, parts)], lead=HOSTILE)
    read = Reader(html)
    assert read.texts.count(HOSTILE) == 2 + 1 + 1 + 1 + 2 + 1 + 2
    assert "img" not in read.tags
    assert "3.5" in read.texts
    assert "url(" not in html
    assert "@import" not in html


def test_a_page_holds_its_sections_in_order() -> None:
    html = page("t", [Section("one", ["a"]), Section("two", [Table(["h"], [["x"], ["y"]])])])
    read = Reader(html)
    shown = [text for text in read.texts if text.strip()]
    assert shown[-7:] == ["t", "one", "a", "two", "h", "x", "y"]
    assert read.tags.count("tr") == 3
