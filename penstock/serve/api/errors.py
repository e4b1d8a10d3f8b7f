"""Errors in the shape that the clients of each dialect read. The path that was asked tells the dialect."""

from __future__ import annotations

from typing import Any

# Anthropic's kinds of errors, by status. What is not here is an error of the client's below 500, and ours above.
_ANTHROPIC = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def error_body(
    path: str, status: int, message: str, kind: str, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """The body of an error. `kind`, `code`, `param`: as OpenAI's API has them."""
    if path.startswith("/v1/messages"):
        named = _ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": named, "message": message}}
    if path.startswith("/api/"):  # Ollama's
        return {"error": message}
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
