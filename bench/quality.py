"""`python -m bench.quality`: what int8 and int4 weights cost the bundled model, as perplexity and KL divergence.

The text is read where it lies and not shipped (WikiText-2, test split). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import penstock
from penstock.serve.engine import Engine
from penstock.serve.evaluate import evaluate
from penstock.serve.planning import default_cache
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.store.pack import pack

MODEL = Path(penstock.__file__).parent / "assets" / "tale-llama"
TEXT = Path("../shared/data/wikitext2/wiki.test.raw")
# (format, whether activations stay float32)
VARIANTS = {"float32": ("float32", True), "int8": ("int8", False), "int8-exact": ("int8", True),
            "int4": ("int4", False), "int4-exact": ("int4", True)}  # fmt: skip


def measure(model: Path, text: str, folder: Path) -> dict[str, Any]:
    """Per variant: perplexity, its ratio to float32's, KL and agreement with float32. "-exact" multiplies with float32
    activations, the others round them to int8, a scale per group."""
    ask = Ask(score=True, context=512, prompt_tokens=512, output_tokens=1)
    for fmt in {fmt for fmt, _ in VARIANTS.values()}:
        pack(model, folder / fmt, parse_format(fmt))
    engines = {
        name: Engine.load(folder / fmt, ask, cache=default_cache(), exact=exact)
        for name, (fmt, exact) in VARIANTS.items()
    }
    rows: dict[str, Any] = {}
    for name, engine in engines.items():
        exact = None if name == "float32" else engines["float32"]
        found = evaluate(engine, text, exact)
        rows[name] = {"perplexity": found.perplexity, "tokens": found.tokens, "kl": found.kl, "agree": found.agree}
        rows[name]["vs_float32"] = found.perplexity / rows["float32"]["perplexity"] - 1
        kl = "" if found.kl is None else f"  KL {found.kl:.5f}  same best token {found.agree:.2%}"
        print(f"{name:11} perplexity {found.perplexity:.4f} ({rows[name]['vs_float32']:+.2%}){kl}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--bytes", type=int, default=None, help="only the first so many characters")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        rows = measure(wanted.model, wanted.text.read_text(encoding="utf-8")[: wanted.bytes], Path(folder))
    print(json.dumps({"bench": "quality", "model": wanted.model.name, "text": wanted.text.name, **rows}))


if __name__ == "__main__":
    main()
