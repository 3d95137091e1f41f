"""The chat page in a real browser, on a stack slow enough to drop its connection by hand."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.browser import BINARY, Page, open_page
from tests.e2e.stack import Stack, running_stack
from tests.waiting import eventually_sync

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BINARY is None, reason="needs chromium")]

QUESTION = "Tell me about relay races. <b>&amp;"
TEXT_OF_REPLY = """[...document.querySelectorAll(".reply:last-child > div:first-child > span:not(.joint)")]
    .map((span) => span.textContent).join("")"""


@pytest.fixture(scope="module")
def slow_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    flags = ("--engine", "sim", "--sim-token-ms", "25", "--sim-jitter-ms", "5")
    with running_stack(tmp_path_factory.mktemp("page"), *flags) as stack:
        yield stack


@pytest.fixture
def page(slow_stack: Stack, tmp_path: Path) -> Iterator[Page]:
    with open_page(tmp_path / "profile") as page:
        page.goto(slow_stack.url)
        yield page


def ask(page: Page, num_tokens: int) -> None:
    page.evaluate(f"$('limit').value = {num_tokens}; $('question').value = {QUESTION!r}; $('send').click()")


def wait_for(page: Page, condition: str, timeout: float = 20) -> None:
    eventually_sync(lambda: page.evaluate(condition) is True, timeout)


def is_over(page: Page) -> None:
    wait_for(page, "!$('send').disabled")


def text_in_the_log(page: Page, stack: Stack) -> str:
    """The text of the reply that the page shows last, as the gateway tells it."""
    reply_id = page.evaluate("document.querySelector('.reply:last-child .facts code').textContent")
    text: str = httpx.get(f"{stack.url}/v1/streams/{reply_id}/state").json()["text"]
    return text


def test_text_appears_as_it_comes_and_the_times_are_shown(page: Page, slow_stack: Stack) -> None:
    ask(page, 40)
    wait_for(page, f"({TEXT_OF_REPLY}).length > 0 && $('send').disabled")
    is_over(page)
    assert page.evaluate(TEXT_OF_REPLY) == text_in_the_log(page, slow_stack)
    assert page.evaluate("document.querySelector('.mine').textContent") == QUESTION
    wait_for(page, "document.querySelectorAll('.facts tr').length >= 5")
    facts = page.evaluate("document.querySelector('.facts').textContent")
    assert "first text after" in facts
    assert "40 generated" in facts


def test_a_dropped_connection_is_resumed_without_gap_or_repeat(page: Page, slow_stack: Stack) -> None:
    ask(page, 80)
    wait_for(page, f"({TEXT_OF_REPLY}).length > 20")
    page.evaluate("$('drop').click()")
    wait_for(page, "$('state').textContent.includes('dropped') && !$('resume').disabled")
    seen = page.evaluate(TEXT_OF_REPLY)
    page.evaluate("$('resume').click()")
    is_over(page)
    whole = page.evaluate(TEXT_OF_REPLY)
    assert whole == text_in_the_log(page, slow_stack)
    assert whole.startswith(seen)
    assert 20 < len(seen) < len(whole)
    assert "no gap" in page.evaluate("$('state').textContent")


@pytest.mark.parametrize("dropped", ["", "$('drop').click()"], ids=["connected", "dropped"])
def test_cancel_ends_the_reply_on_the_server(page: Page, slow_stack: Stack, dropped: str) -> None:
    ask(page, 4000)
    wait_for(page, f"({TEXT_OF_REPLY}).length > 20")
    page.evaluate(dropped)
    page.evaluate("$('cancel').click()")
    is_over(page)
    assert page.evaluate("$('state').textContent").startswith("Cancelled")
    eventually_sync(lambda: sum(slow_stack.blocks_used().values()) == 0, timeout=20)


def test_colours_follow_the_system(page: Page) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        page.prefer("prefers-color-scheme", scheme)
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds[0] != grounds[1]
