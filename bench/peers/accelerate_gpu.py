"""`python -m bench.peers.accelerate_gpu CONFIG --device-bytes N`: transformers with accelerate's CPU offload, a shape's
weights in bfloat16 with at most so many bytes of them on the card, the rest in RAM; for `bench.gpu`.

Weights are whatever memory holds: no time depends on them. One JSON line: tokens a second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import accelerate
import torch
import transformers

from bench.peers import PROMPT_TOKENS, token_ids


@torch.inference_mode()
def decode_tokens_per_s(config: Path, device_bytes: int, steps: int, repeats: int) -> list[float]:
    shape = transformers.AutoConfig.from_pretrained(config.parent if config.name == "config.json" else config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).eval()
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.zero_()
    memory = {0: device_bytes, "cpu": 1 << 40}
    places = accelerate.infer_auto_device_map(model, max_memory=memory, no_split_module_classes=model._no_split_modules)
    model = accelerate.dispatch_model(model, places)
    found = []
    for _ in range(repeats):
        ids = torch.from_numpy(token_ids(shape.vocab_size, PROMPT_TOKENS)).long()[None].to("cuda")
        cache = None
        for step in range(steps + 1):
            if step == 1:
                torch.cuda.synchronize()
                start_s = time.perf_counter()
            answer = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, ids = answer.past_key_values, answer.logits[:, -1].argmax(-1, keepdim=True).to("cuda")
        torch.cuda.synchronize()
        found.append(steps / (time.perf_counter() - start_s))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--device-bytes", type=int, required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    wanted = parser.parse_args()
    found = decode_tokens_per_s(wanted.config, wanted.device_bytes, wanted.steps, wanted.repeats)
    versions = {module.__name__: module.__version__ for module in (torch, transformers, accelerate)}
    print(json.dumps({"decode_tokens_per_s": [statistics.median(found), min(found), max(found)], "versions": versions}))


if __name__ == "__main__":
    main()
