"""The page at /: a chat, and the machine beside it. Files of this package alone, nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response
from starlette.exceptions import HTTPException

import penstock
from penstock.runtime import host
from penstock.serve.api.guard import PAGE
from penstock.serve.api.shelf import Shelf
from penstock.spec.places import HOST, Tier
from penstock.store.files import read_bytes

_FOLDER, _MOST_BYTES = Path(penstock.__file__).parent / "assets" / "page", 1 << 20
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_FILES = ("index.html", "page.css", "app.js", "live.js", "markdown.js", "server.js", "store.js")
_HEADERS = {
    # No script but these files, nothing from elsewhere, and no other page may hold this one in a frame.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def routes(app: FastAPI, shelf: Shelf) -> None:
    """Adds the page's routes."""

    def sent(name: str) -> Response:
        if name not in _FILES:
            raise HTTPException(404, "there is no such file")
        content = read_bytes(_FOLDER / name, _MOST_BYTES)
        return Response(content, media_type=f"{_KINDS[name.rpartition('.')[2]]}; charset=utf-8", headers=_HEADERS)

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return sent("index.html")

    @app.get(PAGE + "{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        return sent(name)

    @app.get("/v1/live")
    async def live() -> dict[str, Any]:
        """What the machine does now: counters, and what of them to compare with. Of each tier the bytes that the plan
        has there at most, and of RAM those that this process has now."""
        loaded = shelf.require_now()
        service, engine = loaded.service, loaded.service.engine
        counts, plan = service.counts, engine.plan
        limits: dict[Tier, int | None] = {HOST: engine.ask.host_memory_bytes}
        had: dict[Tier, int] = {HOST: host.rss_bytes()}
        return {
            "model": loaded.name,
            "sequences": plan.sequences,
            "predicted_tokens_per_s": engine.prediction.decode_tokens_per_s,
            "running": counts.running,
            "waiting": counts.waiting,
            "prompt_tokens": counts.prompt_tokens,
            "output_tokens": counts.output_tokens,
            "passes_s": counts.passes_s,
            "kv_pages": counts.pages,
            "kv_pages_had": counts.pages_had,
            "moved_bytes": {str(lane): nbytes for lane, nbytes in engine.session.bytes_moved().items()},
            "tiers": [
                {"name": str(tier), "bytes": nbytes, "limit_bytes": limits.get(tier), "had_bytes": had.get(tier)}
                for tier, nbytes in plan.tier_bytes().items()
            ],
        }
