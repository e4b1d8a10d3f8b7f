"""What the numbers of a quantised file give here and in llama.cpp, for `bench.files`: perplexity, agreement, KL.

The trained models at hand in float16, quantised by llama.cpp's own quantiser: in MXFP4 the one with experts, whose
other matrices are Q8_0 then, else all of them. Where columns are no multiple of 256, K-quants fall back to Q5_0 and
Q8_0. tale-relu runs with SiLU in both engines, since llama.cpp knows no llama with ReLU. Both engines read the same
windows of tokens. By default both round activations to int8, each in its own way; with `--exact` ours does not. The
writer of the file is of the tests, and needs torch and transformers.
"""

from __future__ import annotations

import ctypes
import math
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import penstock
from bench.offload_engines import tell
from bench.peers.random_gguf import MXFP4
from penstock.runtime import host
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.log_probabilities import log_softmax
from penstock.serve.planning import default_cache
from penstock.spec.ask import Ask
from penstock.store.pack import pack

MODELS = (
    Path(penstock.__file__).parent / "assets" / "tale-llama", Path(__file__).parent / "tale-relu",
    Path(__file__).parent / "tale-moe",
)  # fmt: skip
EXPERTS = "tale-moe"
TEXT = Path("../shared/data/wikitext2/wiki.test.raw")
WINDOW = 512

Array = NDArray[Any]


class Peer:
    """llama.cpp with one file, giving the logits of every token."""

    def __init__(self, file: Path) -> None:
        import llama_cpp

        threads = host.usable_cpus()
        self._model = llama_cpp.Llama(
            str(file), n_ctx=WINDOW, n_batch=WINDOW, logits_all=True, n_threads=threads, n_threads_batch=threads,
            verbose=False,
        )  # fmt: skip

    def score(self, ids: list[int]) -> Array:
        """float32 [n, V]."""
        self._model.reset()
        self._model.eval(ids)
        return np.array(self._model.scores[: len(ids)], np.float32)


def quantised(model: Path, mix: str, folder: Path) -> Path:
    """A trained model as llama.cpp's quantiser makes it."""
    import llama_cpp

    from tests.cpu import gguf_models

    wide, file = folder / f"{model.name}-f16.gguf", folder / f"{model.name}-{mix}.gguf"
    if not wide.exists():
        words = gguf_models.tokenizer_metadata(model, "gpt-2")
        gguf_models.convert(model, wide, lambda _: gguf_models.Kind.F16, words)
    how = llama_cpp.llama_model_quantize_default_params()
    how.ftype = {
        "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
        "mxfp4": llama_cpp.LLAMA_FTYPE_MOSTLY_MXFP4_MOE,
    }[mix]  # fmt: skip
    how.nthread = host.usable_cpus()
    failed = llama_cpp.llama_model_quantize(str(wide).encode(), str(file).encode(), ctypes.byref(how))
    if failed:
        raise SystemExit(f"llama.cpp did not quantise {wide.name}: {failed}")
    return file


class Scores:
    """Sums over the tokens of windows. The peer's distribution is the one that KL is from."""

    def __init__(self) -> None:
        self.nll = self.kl = 0.0
        self.tokens = self.agreed = 0

    def add(self, logits: Array, targets: Array, peer: Array | None) -> None:
        """logits, peer float32 [n, V]; targets int64 [n]."""
        logp = log_softmax(logits)
        self.nll -= float(logp[np.arange(len(targets)), targets].sum(dtype=np.float64))
        self.tokens += len(targets)
        if peer is not None:
            other = log_softmax(peer)
            self.kl += float((np.exp(other) * (other - logp)).sum(dtype=np.float64))
            self.agreed += int((other.argmax(axis=1) == logp.argmax(axis=1)).sum())

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.tokens)


def compare(mix: str, text_file: Path, characters: int, folder: Path) -> dict[str, Any]:
    """Of each model: perplexity here over llama.cpp's, the share of tokens after which both rank the same token first,
    and the mean KL(llama.cpp ‖ here) in nats; by default and with `--exact`. Beside them the worst of all models."""
    if not text_file.is_file():
        return {"perplexity_ratio": None, "quality_reason": f"there is no {text_file}: name a text with --text"}
    text = text_file.read_text(encoding="utf-8")[:characters]
    models = [model for model in MODELS if mix != MXFP4 or model.name == EXPERTS]
    by_model = {model.name: _compare_model(model, mix, text, folder) for model in models}
    worst = {"perplexity_ratio": lambda ratio: -abs(math.log(ratio)), "agreement": float, "kl": lambda kl: -kl}
    found: dict[str, Any] = {}
    for name, goodness in worst.items():
        for end in ("", "_exact"):
            found[name + end] = min((figures[name + end] for figures in by_model.values()), key=goodness)
    return {**found, "quality": by_model}


def _compare_model(model: Path, mix: str, text: str, folder: Path) -> dict[str, Any]:
    file = quantised(model, mix, folder)
    packed = pack(file, folder / f"{model.name}-{mix}")
    ask = Ask(score=True, context=WINDOW, prompt_tokens=WINDOW, output_tokens=1, kv="float16")
    theirs, peer = Peer(file), Scores()
    ours = {"default": Scores(), "exact": Scores()}
    with (
        closing(Engine.load(packed, ask, Loading(cache=default_cache()))) as rounded,
        closing(Engine.load(packed, ask, Loading(cache=default_cache(), exact=True))) as exact,
    ):
        ids = rounded.tokenizer.encode(text)
        for lo in range(0, len(ids) - 1, WINDOW):
            window = ids[lo : lo + WINDOW]
            if len(window) < 2:
                continue
            targets = np.array(window[1:], np.int64)
            expected = theirs.score(window)[:-1]
            peer.add(expected, targets, None)
            for name, engine in (("default", rounded), ("exact", exact)):
                logits = np.concatenate(list(engine.score(window)))[: len(targets)]
                ours[name].add(logits, targets, expected)
    found: dict[str, Any] = {"perplexity": ours["default"].perplexity, "llamacpp_perplexity": peer.perplexity}
    for name, scores in ours.items():
        end = "" if name == "default" else f"_{name}"
        found[f"perplexity_ratio{end}"] = scores.perplexity / peer.perplexity
        found[f"agreement{end}"] = scores.agreed / scores.tokens
        found[f"kl{end}"] = scores.kl / scores.tokens
    told = ", ".join(f"{name} {value:.5g}" for name, value in found.items())
    tell(f"{model.name}, {mix}, {peer.tokens} tokens: {told}")
    return {**found, "tokens": peer.tokens}
