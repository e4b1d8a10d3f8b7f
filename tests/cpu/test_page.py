"""The page in a real browser: a whole chat, by keyboard too, narrow and dark; nothing from elsewhere, no markup of a
model's."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.page_shots import STATES, State, shown
from tests.cpu.commands import ROOT
from tests.cpu.servers import Server, serving
from tests.cpu.test_tools import BUNDLED

BROWSER = shutil.which("chromium")
playwright = pytest.importorskip("playwright.sync_api")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium here")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="module")
def server(cache: Path) -> Iterator[Server]:
    with serving(BUNDLED, cache, "--batch", 2, "--name", "tale", "--context", 512) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=BROWSER, args=[*FLAGS])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    """The page, as a browser that never saw it opens it. A line on its console, or a request to elsewhere, fails."""
    context = browser.new_context()
    opened = context.new_page()
    said, asked = list[str](), list[str]()
    opened.on("console", lambda line: said.append(line.text) if line.type in ("error", "warning") else None)
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(f"http://127.0.0.1:{server.port}/")
    opened.wait_for_function("() => document.getElementById('model').textContent === 'tale'")
    yield opened
    home = f"http://127.0.0.1:{server.port}/"
    assert said == [] and all(url.startswith((home, "blob:", "data:")) for url in asked), (said, asked)
    context.close()


def ask(page: Any, text: str) -> str:
    """Sends a message, waits for the whole answer, and returns it."""
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    page.wait_for_function(
        "() => document.getElementById('status').textContent.includes('first word after')", timeout=60_000
    )
    return str(page.locator("#messages > article.assistant .text").last.inner_text())


def few(page: Any) -> None:
    """Short answers, greedy ones, by the settings."""
    page.click("#show-settings")
    page.fill("[name=max_tokens]", "12")
    page.fill("[name=temperature]", "0")
    page.click("#settings button")


def sent(page: Any, text: str) -> dict[str, Any]:
    """The request of a message."""
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, text)
    return dict(asked.value.post_data_json)


@needs_browser
def test_a_chat(page: Any, server: Server) -> None:
    few(page)
    said = ask(page, "Once upon a time")
    done = server.client().chat.completions.create(
        model="tale", messages=[{"role": "user", "content": "Once upon a time"}], max_tokens=12, temperature=0
    )
    assert said.split() == (done.choices[0].message.content or "").split()
    assert page.locator("#messages > article").count() == 2
    page.get_by_role("button", name="Regenerate").click()
    page.wait_for_function("() => document.getElementById('status').textContent.includes('first word after')")
    assert page.locator("#messages > article.assistant .text").last.inner_text().split() == said.split()
    page.get_by_role("button", name="Edit").click()
    assert page.input_value("#prompt") == "Once upon a time" and page.locator("#messages > article").count() == 0
    ask(page, "There was a king")
    page.reload()
    assert page.locator("#messages > article.user .text").inner_text() == "There was a king"
    page.get_by_role("button", name="New chat", exact=True).first.click()
    assert page.locator("#messages > article").count() == 0 and page.locator("#list > li").count() == 2
    page.get_by_role("button", name="There was a king", exact=True).click()
    assert page.locator("#messages > article").count() == 2
    page.get_by_role("button", name="Delete There was a king").click()
    assert page.locator("#messages > article").count() == 0


@needs_browser
def test_an_answer_is_stopped(page: Any, server: Server) -> None:
    page.fill("#prompt", "Once upon a time")
    page.press("#prompt", "Enter")
    page.wait_for_function("() => document.querySelector('#messages > article.assistant .text')?.innerText.length > 5")
    page.keyboard.press("Escape")
    page.wait_for_function("() => document.getElementById('status').textContent === 'Stopped.'")
    assert page.locator("#messages > article").count() == 2 and page.locator("#send").is_visible()
    for _ in range(100):
        if "penstock_requests_running 0.0" in server.ask("GET", "/metrics")[2]:
            break
        page.wait_for_timeout(50)
    else:
        pytest.fail("the server goes on with an answer that was stopped")


@needs_browser
def test_by_keyboard_alone(page: Any) -> None:
    few(page)
    page.locator("#prompt").focus()
    page.keyboard.type("A dog")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("and a cat")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.getElementById('status').textContent.includes('first word after')")
    assert page.locator("#messages > article.user .text").inner_text() == "A dog\nand a cat"
    page.keyboard.press("Shift+Tab")  # back from the field, to what one can do with the answer
    assert page.evaluate("document.activeElement.textContent") in ("Regenerate", "Copy")
    page.keyboard.press("Enter")


@needs_browser
def test_settings_go_into_requests(page: Any) -> None:
    wanted = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1, "seed": 7,
        "max_tokens": 4,
    }  # fmt: skip
    page.click("#show-settings")
    page.fill("[name=system]", "Be brief.")
    for name, value in wanted.items():
        page.fill(f"[name={name}]", str(value))
    page.click("#settings button")
    body = sent(page, "Once")
    assert body == {
        **wanted, "model": "tale", "stream": True,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Once"}],
    }  # fmt: skip
    page.reload()
    page.click("#show-settings")
    assert page.input_value("[name=min_p]") == "0.05"  # they are kept
    for name in wanted:
        page.fill(f"[name={name}]", "")
    page.click("#settings button")
    assert sent(page, "Upon").keys() == {"model", "stream", "messages"}


@needs_browser
def test_the_machine_is_shown(page: Any) -> None:
    few(page)
    ask(page, "Once upon a time")
    page.wait_for_function("() => document.querySelector('#speed').innerText.includes('tokens said')")
    shown = page.locator("#machine").inner_text()
    assert "promised" in shown and "host" in shown and re.search(r"MiB of .*iB", shown) and "KV pages" in shown


@needs_browser
def test_a_models_markup_is_text(page: Any) -> None:
    """Markdown is drawn, and whatever else an answer holds is text: no element of it, no address but of the web."""
    answer = (
        "# Title\n\n<img src=x onerror=alert(1)> **bold** `a<b>c` https://example.org/a\n\n- one\n- two\n\n"
        "```js\n<script>alert(1)</script>\n```\njavascript:alert(1) [x](javascript:alert(1))"
    )
    chat = {"messages": [{"role": "user", "content": "<b>hi</b>"}, {"role": "assistant", "content": answer}]}
    page.set_input_files(
        "#open", files=[{"name": "c.json", "mimeType": "application/json", "buffer": json.dumps(chat).encode()}]
    )
    page.wait_for_selector("#messages > article.assistant pre")
    found = page.locator("#messages")
    for name, count in (("img", 0), ("script", 0), ("b", 0), ("strong", 1), ("pre", 1), ("h2", 1)):
        assert found.locator(name).count() == count, name
    assert found.locator("ul li").count() == 2
    assert [link.get_attribute("href") for link in found.locator("a").all()] == ["https://example.org/a"]
    assert "<script>alert(1)</script>" in found.inner_text() and "<b>hi</b>" in found.inner_text()
    page.set_input_files("#open", files=[{"name": "c.json", "mimeType": "application/json", "buffer": b"[1]"}])
    page.wait_for_function("() => document.getElementById('status').textContent.includes('holds no conversation')")
    with page.expect_download() as saved:
        page.click("#save")
    assert json.loads(Path(saved.value.path()).read_text())["messages"][1]["content"] == answer


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_narrow_and_dark(browser: Any, server: Server, width: int, dark: bool, tmp_path: Path) -> None:
    context = browser.new_context(
        viewport={"width": width, "height": 740}, color_scheme="dark" if dark else "light", reduced_motion="reduce"
    )
    page = context.new_page()
    page.goto(f"http://127.0.0.1:{server.port}/")
    few(page)
    ask(page, "Once upon a time")
    page.screenshot(path=tmp_path / "page.png")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(22, 24, 29)") == dark
    if width == 360:
        assert not page.locator("#machine").is_visible()
        page.get_by_role("button", name="Machine").click()
        assert page.locator("#machine").is_visible()
    context.close()


AXE = ROOT / "build" / "axe" / "node_modules" / "axe-core" / "axe.min.js"


@needs_browser
@pytest.mark.skipif(not AXE.is_file(), reason="no axe-core here: `make build/axe` fetches it by npm")
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.name)
def test_axe_finds_nothing(browser: Any, server: Server, state: State) -> None:
    """Neither serious nor any other findings, in the states that docs/page shows."""
    with shown(browser, f"http://127.0.0.1:{server.port}/", state, bypass_csp=True) as page:
        page.add_script_tag(path=AXE)
        found = page.evaluate("() => axe.run().then((found) => found.violations)")
    told = [(each["impact"], each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found]
    assert not told, told


def test_the_pictures_are_small_and_of_these_states() -> None:
    pictures = {file.stem: file.stat().st_size for file in (ROOT / "docs" / "page").glob("*.png")}
    assert pictures.keys() == {state.name for state in STATES} and sum(pictures.values()) <= 600_000


def test_what_is_sent(server: Server) -> None:
    status, headers, text = server.ask("GET", "/")
    assert status == 200 and headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    assert "<script type" in text and "http" not in text.replace("http-equiv", "")
    for name in ("app.js", "page.css"):
        assert server.ask("GET", f"/page/{name}")[0] == 200
    for name in ("..%2F..%2Fmodels", "%2e%2e/tale-llama/config.json", "config.json", "/etc/passwd"):
        assert server.ask("GET", f"/page/{name}")[0] == 404
    assert server.ask("GET", "/", headers={"host": "evil.example"})[0] == 421


def test_the_page_needs_no_key_and_what_it_asks_does(model: Path, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    (tmp_path / "keys").chmod(0o600)
    with serving(model, cache, "--key-file", tmp_path / "keys") as server:
        assert server.ask("GET", "/")[0] == server.ask("GET", "/page/app.js")[0] == 200
        assert server.ask("GET", "/v1/live")[0] == 401
        assert server.ask("GET", "/v1/live", headers={"authorization": "Bearer secret"})[0] == 200
