"""`python -m bench.page_shots`: pictures of the page in fixed states, for people to look at; kept in docs/page.

What the machine does is made up here, so that two runs give the same pictures: the page asks for /v1/live and gets the
answer below. Pictures have 64 colours. tests/cpu/test_page.py brings the page into the same states and has axe-core
look at each.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import penstock
from bench.clients import served

BUNDLED = Path(penstock.__file__).parent / "assets" / "tale-llama"
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
_MIB = 1 << 20
LIVE: dict[str, Any] = {
    "model": "tale", "sequences": 8, "predicted_tokens_per_s": 61.4, "running": 3, "waiting": 1, "prompt_tokens": 5120,
    "output_tokens": 8192, "passes_s": 140.0, "kv_pages": 64, "kv_pages_had": 23,
    "moved_bytes": {"disk0": 310e9, "disk_write0": 0},
    "tiers": [
        {"name": "host", "bytes": 2710 * _MIB, "limit_bytes": 2912 * _MIB, "had_bytes": 2536 * _MIB},
        {"name": "disk0", "bytes": 64 * _MIB, "limit_bytes": None, "had_bytes": None},
    ],
}  # fmt: skip
CHAT = {
    "messages": [
        {
            "role": "user",
            "content": "How many legs has a spider?\nAnswer in a sentence, with the program that you used.",
        },
        {
            "role": "assistant",
            "thought": "A spider is no insect, so not six. Eight.",
            "content": "A spider has **eight** legs, as all *arachnids* have.\n\n## The program\n\n"
            "```python\nlegs = {'ant': 6, 'spider': 8}\nprint(legs['spider'])  # a line that is so long that it has to "
            "scroll sideways where the page is narrow\n```\n\n1. Name the animal.\n2. Look it up with `legs[…]`.\n\n"
            "> Count them, if in doubt.\n\nMore: https://example.org/spiders",
        },
        {"role": "user", "content": "And an ant?"},
        {"role": "assistant", "content": "Six."},
    ]
}


def empty(page: Any) -> None:
    """As it is opened first."""


def chat(page: Any) -> None:
    """A conversation that was opened from a file."""
    content = json.dumps(CHAT).encode()
    page.set_input_files("#open", files=[{"name": "c.json", "mimeType": "application/json", "buffer": content}])
    page.wait_for_selector("#messages > article.assistant pre")
    page.wait_for_timeout(50)


def scrolled(page: Any) -> None:
    chat(page)
    page.evaluate("document.getElementById('messages').scrollTop = 0")


def settings(page: Any) -> None:
    chat(page)
    page.click("#show-settings")
    page.wait_for_selector("#settings[open]")


def machine(page: Any) -> None:
    chat(page)
    page.get_by_role("button", name="Machine").click()


def chats(page: Any) -> None:
    chat(page)
    page.get_by_role("button", name="Chats").click()


def wrong(page: Any) -> None:
    """The server refuses, and says why."""
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            status=400, json={"error": {"message": "the prompt has 700 tokens, the context room for 512: shorten it"}}
        ),
    )
    page.fill("#prompt", "Once upon a time")
    page.press("#prompt", "Enter")
    page.wait_for_selector("#status.wrong")


@dataclass(frozen=True)
class State:
    """How the page comes there, from its first opening."""

    name: str
    reach: Callable[[Any], None]
    width: int = 1280
    dark: bool = False


STATES = (
    State("empty", empty), State("chat", scrolled), State("chat-dark", scrolled, dark=True),
    State("settings", settings), State("settings-dark", settings, dark=True), State("wrong", wrong),
    State("narrow", scrolled, 360), State("narrow-dark", chat, 360, True), State("narrow-machine", machine, 360),
    State("narrow-chats", chats, 360, True),
)  # fmt: skip


@contextmanager
def shown(browser: Any, home: str, state: State, **how: Any) -> Iterator[Any]:
    """The page in this state. `how`: of the browser's context."""
    scheme = "dark" if state.dark else "light"
    context = browser.new_context(
        viewport={"width": state.width, "height": 740}, color_scheme=scheme, reduced_motion="reduce", **how
    )
    page = context.new_page()
    turn = iter(range(1, 1_000_000))
    page.route("**/v1/live", lambda route: route.fulfill(json=live(next(turn))))
    page.goto(home)
    page.wait_for_function("() => document.querySelector('#speed').innerText.includes('tokens said')")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # it asks a second time, and knows rates
    page.wait_for_function("() => !document.querySelector('#speed dd').textContent.includes('–')")
    state.reach(page)
    yield page
    context.close()


def live(turn: int) -> dict[str, Any]:
    """What the machine tells the page the first, the second … time."""
    moved = {lane: nbytes * turn for lane, nbytes in LIVE["moved_bytes"].items()}
    return {
        **LIVE,
        "output_tokens": LIVE["output_tokens"] * turn,
        "passes_s": LIVE["passes_s"] * turn,
        "moved_bytes": moved,
    }


def main() -> None:
    from io import BytesIO

    from PIL import Image
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path("docs/page"))
    given = parser.parse_args()
    given.to.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        sync_playwright() as started,
        served(Path(folder), BUNDLED, None, "--name", "tale", "--context", 512) as server,
        started.chromium.launch(executable_path=shutil.which("chromium"), args=[*FLAGS]) as browser,
    ):
        for state in STATES:
            with shown(browser, f"http://127.0.0.1:{server.port}/", state) as page:
                picture = Image.open(BytesIO(page.screenshot(animations="disabled", caret="hide")))
            target = given.to / f"{state.name}.png"
            picture.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(target, optimize=True)
            print(f"{target}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
