"""The page over a real cluster: both pools are there, a chat by keyboard alone is streamed, its time is explained."""

import pytest
from browser import chromium_page
from live_cluster import LiveCluster

pytestmark = pytest.mark.slow

ANSWER = "document.querySelector('article.assistant:last-of-type')"


def test_a_conversation_by_keyboard_alone(chat_cluster: LiveCluster) -> None:
    """The question has the focus at once; the text grows; the stages add up; nothing leaves this origin."""
    with chromium_page() as page:
        page.open(chat_cluster.url)
        page.wait("document.querySelectorAll('.workers li').length === 2")
        assert page.text("#model") == "smollm2"
        assert page.text("#state") == "ready"
        assert "PROMPT" in page.text("#pools")
        assert "COMPLETION" in page.text("#pools")
        page.evaluate(
            "window.lengths = new Set(); new MutationObserver(() => {"
            f" const text = {ANSWER}?.querySelector('.text').textContent; if (text) window.lengths.add(text.length);"
            "}).observe(document.querySelector('#conversation'), {childList: true, subtree: true, characterData: true})"
        )
        page.evaluate("document.querySelector('#max-tokens').value = 40")
        page.type("Count from one to ten.")
        page.press("Enter")
        page.wait(f"{ANSWER}?.querySelector('.timeline')", timeout_s=90)
        assert page.evaluate("window.lengths.size") > 3
        seconds = page.evaluate(f"[...{ANSWER}.querySelectorAll('.bar div')].map(part => +part.dataset.seconds)")
        end_s = page.evaluate(f"+{ANSWER}.querySelector('.timeline').dataset.end")
        assert sum(seconds) == pytest.approx(end_s, rel=1e-6)
        assert "Prefill" in page.text("article.assistant .legend")
        page.wait("!document.querySelector('#latency').textContent.includes('nothing was asked yet')")
        assert page.errors == []
        assert [url for url in page.urls if not url.startswith((chat_cluster.url, "about:"))] == []
