"""The chat half of the page. The echo model answers with the last message: what stands before `</think>` is its reasoning."""

from __future__ import annotations

import time

from pyluce.luce import Luce
from pyluce.options import LoadOptions
from tests.browser.chromium import Page
from tests.browser.conftest import Visit
from tests.support.echo_service import echo_server

CONTEXT = LoadOptions(max_ctx=1024, max_concurrency=1, max_queue=0)
ANSWERED = "document.getElementById('log').getAttribute('aria-busy') === 'false'"
LAST = "[...document.querySelectorAll('.model')].pop()"


def say(page: Page, text: str) -> None:
    page.type("#prompt", text)
    page.press("Enter")


def answer(page: Page) -> str:
    page.wait(ANSWERED)
    return str(page.js(f"[...{LAST}.querySelectorAll(':scope > .text')].map((e) => e.textContent).join('')"))


def test_an_answer_streams_and_its_reasoning_is_folded(visit: Visit) -> None:
    with echo_server(CONTEXT) as (server, _, _echo):
        page = visit(server.url)
        say(page, "SLOW: let me think </think>\n\nThe answer: é 🦙 日本\n  indented")
        page.wait("document.getElementById('stop').checkVisibility()")
        lengths = set()
        while not page.js(ANSWERED):
            lengths.add(page.js(f"{LAST}.textContent.length"))
        assert len(lengths) > 3, "the answer came in one piece"
        assert answer(page) == "The answer: é 🦙 日本\n  indented"
        assert page.js("document.activeElement.id") == "prompt"
        assert page.js(f"{LAST}.querySelector('details').open") is False
        assert page.js(f"{LAST}.querySelector('details .text').textContent").strip() == "SLOW: let me think"
        page.click(".model summary")
        assert page.js(f"{LAST}.querySelector('details .text').checkVisibility()")
        meta = page.js(f"{LAST}.querySelector('.meta').textContent")
        assert "tok/s" in meta
        assert "tokens" in meta
        assert page.js("document.getElementById('prompt').value") == ""


def test_the_conversation_goes_on_and_starts_anew(visit: Visit) -> None:
    with echo_server(CONTEXT) as (server, luce, _):
        page = visit(server.url)
        before = 0
        for count, text in enumerate(("one", "two", "three"), 1):
            say(page, f"</think>{text}")
            assert answer(page) == text
            assert page.js("document.querySelectorAll('.turn').length") == 2 * count
            tokens = luce.stats().prompt_tokens_total
            assert tokens - before > (count - 1) * 20, "earlier turns are part of the prompt"
            before = tokens
        page.click("#clear")
        assert page.js("document.getElementById('log').childNodes.length") == 0
        page.press("Tab")
        page.click(".options summary")
        page.type("#system", "Be brief.")
        page.type("#max-tokens", "3")
        say(page, "</think>abcdefgh")
        assert answer(page) == "abc"[: len(answer(page))]
        assert "ended by its limit" in page.js(f"{LAST}.textContent")


def test_text_is_never_markup(visit: Visit) -> None:
    evil = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script><b>bold</b>"
    with echo_server(CONTEXT) as (server, _, _echo):
        page = visit(server.url)
        say(page, f"{evil}</think>{evil}")
        assert answer(page) == evil
        assert page.js("document.querySelectorAll('#log img, #log script, #log b').length") == 0
        assert page.js("document.querySelector('.user .text').textContent") == f"{evil}</think>{evil}"
        assert "owned" not in page.js("document.title")


def free(luce: Luce) -> None:
    deadline = time.monotonic() + 20
    while luce.stats().busy_slots:
        assert time.monotonic() < deadline, "the slot stays busy"
        time.sleep(0.01)


def test_stop_ends_the_answer_and_frees_the_slot(visit: Visit) -> None:
    with echo_server(CONTEXT) as (server, luce, _):
        page = visit(server.url)
        say(page, "</think>LONG SLOW and on ")
        page.wait(f"{LAST}.textContent.length > 20")
        page.click("#stop")
        kept = answer(page)
        assert kept.startswith("LONG SLOW")
        assert "stopped" in page.js(f"{LAST}.querySelector('.meta').textContent")
        free(luce)
        say(page, "</think>next")
        assert answer(page) == "next"


def test_errors_are_shown_and_the_message_is_given_back(visit: Visit) -> None:
    with echo_server(CONTEXT) as (server, luce, echo):
        page = visit(server.url)
        say(page, "NAN</think>x")
        page.wait(ANSWERED)
        assert page.js(f"{LAST}.querySelector('.meta.bad').textContent").strip()
        assert page.js("document.getElementById('prompt').value") == "NAN</think>x"
        page.js("document.getElementById('prompt').value = ''")
        say(page, "</think>fine")
        assert answer(page) == "fine"
        other = visit(server.url)
        say(other, "HOLD</think>x")
        assert echo.held.wait(20)
        say(page, "</think>too many")
        page.wait(ANSWERED)
        refused = page.js(f"{LAST}.querySelector('.meta.bad').textContent")
        assert "try again in" in refused
        echo.release.set()
        other.wait(ANSWERED)
        free(luce)
        visit.expected += ["429", "500"]


def test_shift_enter_is_a_new_line_and_the_box_grows(visit: Visit) -> None:
    with echo_server(CONTEXT) as (server, _, _echo):
        page = visit(server.url)
        page.type("#prompt", "</think>first")
        height = page.js("document.getElementById('prompt').offsetHeight")
        page.press("Enter", modifiers=8)
        page.call("Input.insertText", text="second")
        assert page.js("document.getElementById('prompt').value") == "</think>first\nsecond"
        assert page.js("document.getElementById('prompt').offsetHeight") > height
        page.press("Enter")
        assert answer(page) == "first\nsecond"
        assert page.js("document.getElementById('prompt').offsetHeight") == height
