"""lm-eval itself asks a server: its loglikelihoods are those of the same model in this process. It lives in an
environment of its own (`make fuzz` installs it), for its packages are not ours."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock.serve.log_probabilities import log_softmax
from tests.cpu.engines import load
from tests.cpu.servers import CONTEXT, serving

LM_EVAL = Path(__file__).parents[2] / "build" / "lm-eval" / "bin" / "lm_eval"
PAIRS = [
    ("Once upon a", " time"),
    ("Once upon a time there was a miller,", " whose daughter could spin"),
    ("x", "yz"),
    ("The sea is", " blue and very deep"),
    ("one two three", " four five six"),
]
TASK = """\
task: local_pairs
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{continuation}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
"""


@pytest.mark.fuzz
@pytest.mark.skipif(not LM_EVAL.exists(), reason="lm-eval is not installed: make build/lm-eval/stamp")
def test_lm_eval_finds_the_loglikelihoods_of_this_process(model: Path, cache: Path, tmp_path: Path) -> None:
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps({"context": a, "continuation": b}) + "\n" for a, b in PAIRS))
    (tmp_path / "local_pairs.yaml").write_text(TASK.format(data=data))
    with serving(model, cache, "--batch", 4, "--name", "tiny") as server:
        about = {
            "model": "tiny", "base_url": f"http://127.0.0.1:{server.port}/v1/completions", "num_concurrent": 1,
            "max_retries": 1, "tokenizer_backend": "huggingface", "tokenizer": model, "max_length": CONTEXT,
        }  # fmt: skip
        command = [
            LM_EVAL, "run", "--model", "local-completions", "--model_args", *(f"{k}={v}" for k, v in about.items()),
            "--tasks", "local_pairs", "--include_path", tmp_path, "--batch_size", 2, "--log_samples",
            "--output_path", tmp_path / "out",
        ]  # fmt: skip
        offline = {
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(tmp_path),
            "OPENAI_API_KEY": "none",
        }
        subprocess.run([str(each) for each in command], env={**os.environ, **offline}, check=True, timeout=600)
    (samples,) = (tmp_path / "out").rglob("samples_local_pairs*.jsonl")
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(found) == len(PAIRS)
    with load(model, context=CONTEXT, score=True) as engine:
        for each in found:
            expected, greedy = _of_this_process(engine, each["doc"]["context"], each["doc"]["continuation"])
            (logprob, is_greedy), *_ = each["filtered_resps"]
            assert float(logprob) == pytest.approx(expected, abs=1e-4)
            assert str(is_greedy) == str(greedy)


def _of_this_process(engine: Any, context: str, continuation: str) -> tuple[float, bool]:
    """The log probability of a continuation, and whether it is what a greedy answer would say."""
    before, ids = engine.tokenizer.encode(context), engine.tokenizer.encode(context + continuation)
    logp = log_softmax(engine.logits(ids))[len(before) - 1 : -1]
    rest = ids[len(before) :]
    return float(sum(row[token] for row, token in zip(logp, rest, strict=True))), logp.argmax(axis=1).tolist() == rest
