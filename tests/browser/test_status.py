"""The status half of the page: live numbers, reconnecting, keys, small screens, both colour schemes."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

import httpx
import pytest

from pyluce.options import LoadOptions
from tests.browser.conftest import Visit
from tests.support.echo_service import echo_luce, echo_server, running_server
from tests.support.requests_in_background import asking

CONTEXT = LoadOptions(max_ctx=1024, max_concurrency=2, max_queue=4)
SHOWN = "document.getElementById('health').className !== ''"

CONTRASTS = """(() => {
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const back = (e) => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] === 1) return c;
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const e of document.querySelectorAll("body *")) {
    if (!e.checkVisibility() || ![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
    if (e.closest(".stale, button:disabled, script, style, svg")) continue;
    const a = light(parse(getComputedStyle(e).color)), b = light(back(e));
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5) low.push(`${e.tagName} ${e.className} ${e.textContent.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return low;
})()"""

SMALL_TARGETS = """[...document.querySelectorAll("button, input, select, textarea, summary")]
  .filter((e) => e.checkVisibility() && e.getBoundingClientRect().height < 32).map((e) => e.id || e.tagName)"""

OVERFLOWING = """[...document.querySelectorAll(".slot, .slot > div, .card, .facts, .axis, header")]
  .filter((e) => e.checkVisibility() && e.scrollWidth > e.clientWidth + 1).map((e) => e.className || e.tagName)"""

NAMELESS = ("button", "textbox", "combobox", "progressbar", "spinbutton", "img", "log")


def test_the_page_shows_what_each_slot_does(visit: Visit) -> None:
    with echo_server(CONTEXT) as (server, _, _echo):
        page = visit(server.url)
        page.wait(f"{SHOWN} && document.querySelectorAll('.slot.free').length === 2")
        assert page.text("#health") == "ready"
        with asking(server.url, *["</think>SLOW" + "y" * 400] * 3) as answers:
            page.wait("document.querySelectorAll('.slot.decode').length === 2", "two slots at work")
            page.wait("document.getElementById('queue-length').textContent === '1'")
            assert page.text("#slots-busy").lower() == "· 2 of 2 busy"
            assert page.text("#health") == "working"
            busy = httpx.get(server.url + "/status/json").json()["slots"]
            tiles = page.js("[...document.querySelectorAll('.slot')].map((e) => e.innerText)")
            for slot, tile in zip(busy, tiles, strict=True):
                assert f"slot {slot['slot']} · request {slot['request_id']}" in tile
                shown = re.search(r"([\d,]+) tokens\n([\d.]+) tok/s", tile)
                assert shown and 0 < int(shown[1].replace(",", "")) <= slot["generated"]
            visit.shoot(page, "busy")
        assert len(answers) == 3
        page.wait("document.querySelectorAll('.slot.free').length === 2")
        totals = httpx.get(server.url + "/status/json").json()["totals"]
        page.wait(f"document.getElementById('work').innerText.includes('{totals['decode_steps']:,}')")
        work = page.js("document.getElementById('work').innerText")
        assert f"prompt tokens\n{totals['prompt_tokens']:,}" in work
        assert f"generated tokens\n{totals['generated_tokens']:,}" in work
        assert "stop\n3" in page.js("document.getElementById('requests').innerText")
        assert page.js("document.getElementById('chart-generated').getAttribute('d').length") > 20
        assert not page.js("document.getElementById('experts-card').checkVisibility()"), "expert use is not known"
        page.wait("document.getElementById('setup').innerText.includes('1,024 tokens')")


def test_many_slots_show_the_busy_ones_and_how_many_are_free(visit: Visit) -> None:
    with echo_server(LoadOptions(max_ctx=256, max_concurrency=64)) as (server, _, echo):
        page = visit(server.url)
        page.wait("document.getElementById('slots').innerText.includes('64 free slots')")
        with asking(server.url, "HOLD</think>x"):
            page.wait("document.getElementById('slots').innerText.includes('63 free slots')")
            assert page.js("document.querySelectorAll('.slot').length") == 2
            echo.release.set()


def test_the_page_comes_back_when_the_server_does(visit: Visit) -> None:
    with echo_luce(CONTEXT) as (luce, echo):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with running_server(luce, CONTEXT, echo.vocabulary, port=port) as server:
            page = visit(server.url)
            page.wait("document.getElementById('health').className === 'ok'")
        page.wait("document.getElementById('health').className === 'lost'")
        assert page.js("document.getElementById('status').classList.contains('stale')")
        visit.shoot(page, "lost")
        with running_server(luce, CONTEXT, echo.vocabulary, port=port):
            page.wait("document.getElementById('health').className === 'ok'", "the page to reconnect")
            assert not page.js("document.getElementById('status').classList.contains('stale')")


def test_a_key_is_asked_for_and_kept_nowhere(visit: Visit) -> None:
    with echo_server(CONTEXT, api_key="open sesame") as (server, _, _echo):
        page = visit(server.url)
        page.wait("document.getElementById('locked').checkVisibility()")
        assert page.text("#health") == "key needed"
        visit.shoot(page, "locked")
        page.type("#unlock-key", "wrong")
        page.press("Enter")
        page.wait(
            "document.getElementById('locked').checkVisibility() && document.getElementById('unlock-key').value === ''"
        )
        page.type("#unlock-key", "open sesame")
        page.press("Enter")
        page.wait("document.getElementById('health').className === 'ok'")
        assert not page.js("document.getElementById('locked').checkVisibility()")
        page.type("#prompt", "</think>hello")
        page.press("Enter")
        page.wait("document.querySelector('.model .meta') !== null")
        assert page.js("document.querySelector('.model .text').textContent") == "hello"
        assert page.js("localStorage.length + sessionStorage.length + document.cookie.length") == 0
        assert "sesame" not in page.js("document.documentElement.outerHTML + location.href")
        visit.expected += ["401"]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("view", [{"width": 390, "height": 844, "phone": True}, {"width": 820, "height": 1180}, {}])
def test_it_fits_every_screen_and_can_be_read(visit: Visit, view: dict[str, Any], dark: bool) -> None:
    with echo_server(CONTEXT) as (server, _, echo), asking(server.url, "HOLD</think>x"):
        page = visit(server.url, dark=dark, **view)
        page.wait("document.querySelector('.slot.prefill') !== null")
        assert re.search(r"prefill\nslot 0 · request 1\n\d+ of \d+ tokens\n\d+ %", page.text(".slot"))
        page.wait("document.getElementById('setup').innerText.includes('1,024 tokens')")
        tabs = page.js("document.getElementById('tabs').checkVisibility()")
        assert tabs == (view.get("width", 1280) < 960)
        for tab in ("status", "chat"):
            if tabs:
                page.click(f"#tab-{tab}")
            visit.shoot(page, tab)
            assert page.js("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the screen"
            assert page.js(f"document.getElementById('{tab}').checkVisibility()")
            assert page.js(OVERFLOWING) == []
            assert page.js(CONTRASTS) == []
            assert page.js(SMALL_TARGETS) == []
        if tabs:
            assert not page.js("document.getElementById('status').checkVisibility()")
            assert page.js("document.getElementById('compose').getBoundingClientRect().bottom <= innerHeight + 1")
        echo.release.set()


def test_everything_has_a_name_for_those_who_listen(visit: Visit) -> None:
    with echo_server(CONTEXT) as (server, _, echo), asking(server.url, "HOLD</think>x"):
        page = visit(server.url)
        page.wait("document.querySelector('.slot.prefill') !== null")
        page.click(".options summary")
        nodes = page.call("Accessibility.getFullAXTree")["nodes"]
        named = [
            (node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]
        ]
        assert {role for role, name in named if not name and role in NAMELESS} == set()
        assert len([role for role, _ in named if role == "heading"]) >= 8
        assert {"banner", "main", "navigation"} - {role for role, _ in named} <= {"navigation"}
        echo.release.set()


def test_memory_is_shown_by_place_and_experts_when_known(visit: Visit) -> None:
    with echo_server(CONTEXT) as (server, _, _echo):
        page = visit(server.url)
        page.wait(SHOWN)
        report = {"weights": {"mapped_bytes": 3 << 30}, "cache": {"n_bytes": 512, "budget_bytes": 1 << 40}, "graphs": 4}
        page.js("show = () => {}")  # the server's next status would hide it again
        page.js("document.getElementById('experts-card').hidden = false")
        page.js(f"showReport(document.getElementById('experts'), {json.dumps(report)})")
        assert page.text("#experts").split() == "weights, mapped 3.0 GiB cache 512 B".split()
        experts = {"layers": 8, "hot_share": "12 %", "resident_bytes": 2048}
        page.js(f"showReport(document.getElementById('experts'), {json.dumps(experts)}, true)")
        assert page.text("#experts").split() == "layers 8 hot share 12 % resident 2.0 KiB".split()
