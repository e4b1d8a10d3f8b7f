"""`python -m bench.quality`: what int8 and int4 cost the bundled model, in weights or in the KV cache, as perplexity
and KL divergence.

The text is read where it lies and not shipped (WikiText-2, test split). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import penstock
from bench.report import model_folder
from penstock.serve.engine import Engine
from penstock.serve.evaluate import evaluate
from penstock.serve.loading import Loading
from penstock.serve.planning import default_cache
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.store.pack import pack

MODEL = Path(penstock.__file__).parent / "assets" / "tale-llama"
TEXT = Path("../shared/data/wikitext2/wiki.test.raw")
# (format, whether activations stay float32)
VARIANTS = {"float32": ("float32", True), "int8": ("int8", False), "int8-exact": ("int8", True),
            "int4": ("int4", False), "int4-exact": ("int4", True)}  # fmt: skip
KV_FORMATS = ("float32", "float16", "int8", "int4")
KV_CHARACTERS = 100_000


def load(folder: Path, fmt: str, exact: bool, kv: str | None = None, attention: str = "full") -> Engine:
    ask = Ask(score=True, context=512, prompt_tokens=512, output_tokens=1, kv=kv, attention=attention)
    return Engine.load(folder / fmt, ask, Loading(cache=default_cache(), exact=exact))


def compared(engines: dict[str, Engine], text: str) -> dict[str, Any]:
    """Per engine: perplexity, its ratio to the first one's, KL divergence and agreement with it."""
    rows: dict[str, Any] = {}
    first, base = next(iter(engines.items()))
    for name, engine in engines.items():
        found = evaluate(engine, text, None if engine is base else base)
        rows[name] = {"perplexity": found.perplexity, "tokens": found.tokens, "kl": found.kl, "agree": found.agree}
        rows[name]["vs_float32"] = found.perplexity / rows[first]["perplexity"] - 1
        kl = "" if found.kl is None else f"  KL {found.kl:.6f}  same best token {found.agree:.2%}"
        print(f"{name:11} perplexity {found.perplexity:.4f} ({rows[name]['vs_float32']:+.2%}){kl}", flush=True)
    return rows


def measure(model: Path, text: str, folder: Path) -> dict[str, Any]:
    """Of the formats of weights over the whole text, of those of the KV cache (weights float32) over its beginning.
    "-exact" multiplies with float32 activations, the others round them to int8, a scale per group."""
    for fmt in {fmt for fmt, _ in VARIANTS.values()}:
        pack(model, folder / fmt, parse_format(fmt))
    rows = compared({name: load(folder, fmt, exact) for name, (fmt, exact) in VARIANTS.items()}, text)
    caches = {f"kv-{kv}": load(folder, "float32", True, kv) for kv in KV_FORMATS}
    return {**rows, **compared(caches, text[:KV_CHARACTERS])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--bytes", type=int, default=None, help="only the first so many characters")
    wanted = parser.parse_args()
    with model_folder(None) as folder:
        rows = measure(wanted.model, wanted.text.read_text(encoding="utf-8")[: wanted.bytes], folder)
    print(json.dumps({"bench": "quality", "model": wanted.model.name, "text": wanted.text.name, **rows}))


if __name__ == "__main__":
    main()
