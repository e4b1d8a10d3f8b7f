"""Penstock runs language models bigger than memory and tells their speed before it loads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from penstock.serve.async_llm import AsyncLLM
    from penstock.serve.llm import LLM
    from penstock.serve.outputs import CompletionOutput, RequestOutput
    from penstock.serve.planning import plan
    from penstock.serve.sampling import SamplingParams

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__", "plan"]

_HOMES = {
    "LLM": "penstock.serve.llm",
    "AsyncLLM": "penstock.serve.async_llm",
    "CompletionOutput": "penstock.serve.outputs",
    "RequestOutput": "penstock.serve.outputs",
    "SamplingParams": "penstock.serve.sampling",
    "plan": "penstock.serve.planning",
}


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first used: so `import penstock` costs milliseconds, and loads no numpy.
    Raises ImportError where this system is none that penstock runs on."""
    if name in _HOMES:
        import importlib
        import sys

        from penstock.elsewhere import why_not

        if (why := why_not(sys.platform)) is not None:
            raise ImportError(why)
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
