"""`python -m bench.accuracy`: what 4 bits cost three small models, of weights and of both weights and KV, and what it
costs to read a tenth of the values (FlexGen's Table 5).

Perplexity is of WikiText-2 (test split). The share of LAMBADA last words that the likeliest tokens make is told beside,
and asserts nothing: the models are small, and read other books. Texts are read where they lie and not shipped. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from bench.quality import MODEL, TEXT, load
from bench.report import model_folder
from penstock.serve.engine import Engine
from penstock.serve.evaluate import evaluate
from penstock.spec.format import parse_format
from penstock.store.pack import pack

HERE = Path(__file__).parent
MODELS = (MODEL, HERE / "tale-opt", HERE / "tale-moe")
WORDS = TEXT.parents[1] / "eval" / "lambada_openai.jsonl"
# name → (format of weights, whether activations stay float32, format of KV, attention)
SETTINGS = {
    "exact": ("float32", True, "float32", "full"),
    "int4 weights": ("int4", False, "float16", "full"),
    "int4 weights and KV": ("int4", False, "int4", "full"),
    "10 % of V": ("float32", True, "float32", "top-k:0.1"),
    "int4 weights and KV, 10 % of V": ("int4", False, "int4", "top-k:0.1"),
}


def last_words(engine: Engine, count: int) -> float:
    """The share of the first `count` texts whose last word is made of the likeliest tokens."""
    right = 0
    texts = [json.loads(line) for line in WORDS.read_text(encoding="utf-8").splitlines()[:count]]
    for text in texts:
        before = engine.tokenizer.encode(text["context"])
        ids = engine.tokenizer.encode(f"{text['context']} {text['continuation']}")
        same = next((i for i, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), len(before))
        ids, same = ids[-engine.plan.context :], same - max(0, len(ids) - engine.plan.context)
        likeliest = np.concatenate([rows.argmax(axis=1) for rows in engine.score(ids)])  # [T]
        right += bool((likeliest[same - 1 : -1] == np.array(ids[same:])).all())
    return right / len(texts)


def measure(model: Path, text: str, words: int) -> dict[str, Any]:
    """Of one model in each setting, perplexities also as shares of the exact one."""
    rows: dict[str, Any] = {}
    with model_folder(None) as folder:
        for fmt in dict.fromkeys(fmt for fmt, *_ in SETTINGS.values()):
            pack(model, folder / fmt, parse_format(fmt))
        for name, (fmt, exact, kv, attention) in SETTINGS.items():
            engine = load(folder, fmt, exact, kv, attention)
            perplexity = evaluate(engine, text).perplexity
            rows[name] = {"perplexity": perplexity, "last_words": last_words(engine, words)}
            rows[name]["vs_exact"] = perplexity / rows["exact"]["perplexity"]
            engine.close()
            print(f"{model.name:11} {name:30} {rows[name]}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, nargs="+", default=MODELS)
    parser.add_argument("--characters", type=int, help="of the text; default all")
    parser.add_argument("--words", type=int, default=500, help="texts of LAMBADA")
    wanted = parser.parse_args()
    text = TEXT.read_text(encoding="utf-8")[: wanted.characters]
    found = {model.name: measure(model, text, wanted.words) for model in wanted.models}
    print(json.dumps({"bench": "accuracy", "characters": len(text), "words": wanted.words, **found}))


if __name__ == "__main__":
    main()
