"""The page in a real browser, over a scripted backend: what a model says is text, what goes wrong is said in words."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from browser import SHIFT, Page, chromium_page
from twinpool.router.generation import GenerationFailed

pytestmark = pytest.mark.slow

LAST_ANSWER = "article.assistant:last-of-type"
AT_REST = "document.querySelector('#conversation').getAttribute('aria-busy') === 'false'"
Say = Callable[..., list[Any]]


@pytest.fixture
def page(server_url: str) -> Iterator[Page]:
    with chromium_page() as page:
        page.open(server_url)
        page.wait("document.querySelectorAll('.workers li').length === 3")
        yield page
        assert page.errors == []
        assert [url for url in page.urls if not url.startswith((server_url, "about:"))] == []


def ask(page: Page, text: str) -> str:
    """Type and send; return the answer's text once it is complete."""
    page.type(text)
    page.press("Enter")
    page.wait(f"{AT_REST} && document.activeElement.id === 'question'")
    return page.text(f"{LAST_ANSWER} .text")


def test_what_a_model_says_stays_text(page: Page, backend: Any, say: Say) -> None:
    """Markup in an answer, and in a question, is shown and does nothing; the stages add up to the whole."""
    evil = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>&lt;b&gt;"
    backend.script = lambda request: say(evil)
    assert ask(page, evil) == evil
    assert page.text("article.user .text") == evil
    assert page.evaluate("document.title") == "Twinpool"
    assert page.evaluate("document.querySelectorAll('#conversation :is(img, script, b:not(.legend b))').length") == 0
    seconds = page.evaluate(f"[...document.querySelectorAll('{LAST_ANSWER} .bar div')].map(e => +e.dataset.seconds)")
    end_s = page.evaluate(f"+document.querySelector('{LAST_ANSWER} .timeline').dataset.end")
    assert sum(seconds) == pytest.approx(end_s, rel=1e-6)


def test_stop_ends_the_request_and_keeps_what_came(page: Page, backend: Any, say: Say, new_gate: Any) -> None:
    """By Escape and by the button, from the keyboard alone; then the conversation goes on."""
    for by_button in (False, True):
        backend.script = lambda request: [*say("some words")[:-1], new_gate()]
        backend.closed.clear()
        page.type("go on for ever")
        page.press("Enter")
        page.wait(f"document.querySelector('{LAST_ANSWER} .text').textContent === 'some words'")
        if by_button:
            page.press("Tab")
            assert page.evaluate("document.activeElement.id") == "stop"
            page.press("Enter")
        else:
            page.press("Escape")
        assert backend.closed.wait(10)
        page.wait(AT_REST)
        assert "Stopped." in page.text(LAST_ANSWER)
        page.evaluate("document.querySelector('#question').focus()")
    backend.script = lambda request: say("fine")
    assert ask(page, "still there?") == "fine"
    sent = backend.requests[-1].token_ids
    assert len(sent) > len(backend.requests[0].token_ids)  # the turns before are part of the prompt


@pytest.mark.parametrize("is_late", [False, True])
def test_errors_are_said_in_words(page: Page, backend: Any, say: Say, is_late: bool) -> None:
    """With a status or in the stream; the next question is served as if nothing had been."""
    failure = GenerationFailed("queue_full", "Too many requests wait already.", retry_after_s=7)
    backend.script = lambda request: [*(say("half")[:-1] if is_late else ()), failure]
    ask(page, "hello")
    shown = page.text(LAST_ANSWER)
    assert "Too many requests wait already." in shown
    assert ("Try again in 7 s." in shown) != is_late
    assert ("half" in shown) == is_late
    page.errors[:] = [error for error in page.errors if "503" not in error]  # the browser's own line for the status
    backend.script = lambda request: say("fine")
    assert ask(page, "again") == "fine"


def test_lines_and_a_new_conversation(page: Page, backend: Any, say: Say) -> None:
    """Shift+Enter is a new line; a new conversation forgets the old one."""
    page.type("one")
    page.press("Enter", SHIFT)
    assert ask(page, "two") == "hello world"
    assert page.text("article.user .text") == "one\ntwo"
    first = backend.requests[-1].token_ids
    page.evaluate("document.querySelector('#clear').click()")
    assert page.evaluate("document.querySelectorAll('article').length") == 0
    page.type("one")
    page.press("Enter", SHIFT)
    ask(page, "two")
    assert backend.requests[-1].token_ids == first
