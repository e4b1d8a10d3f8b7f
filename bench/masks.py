"""What holding answers to a JSON schema costs a server, for `bench.page`.

Eight streams of one server with all weights in memory, in turns with a schema and without, sampled at temperature 1 and
greedily. The weights are random, and so are the words of the vocabulary: as many as the model has logits, of 1 to 12
letters, so that masks are of the size of a real model's. Answers of either kind have the same length: random weights
do not come to the end of the schema before.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
from pathlib import Path
from typing import Any

from bench.clients import Server, Stream, counted_tokens_per_s, kept_busy, served
from bench.offload_engines import tell
from penstock.spec.format import parse_format
from penstock.store.packed import open_packed
from penstock.store.synth import synth

STREAMS, CONTEXT, ANSWER_TOKENS, TURN_S = 8, 512, 400, 5.0
_MARKS, _LETTERS = '",:{}[].;Ċ', "etaoinshrdlucmfwypvbgkjqxz"
# What programs ask for that read records out of a text: strings, numbers, one of some words, lists. Each takes another
# mask.
SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 24,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "kind": {"enum": ["person", "place", "thing", "idea"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
            "note": {"type": "string"},
            "open": {"type": "boolean"},
        },
        "required": ["name", "age", "kind", "tags", "note", "open"],
        "additionalProperties": False,
    },
}


def vocabulary(size: int) -> list[str]:
    """So many entries, as a byte-level tokenizer spells them: letters, runs of marks, and made-up words, half of them
    behind a space. One in two hundred has a quotation mark, none of them a word: as in real vocabularies."""
    chosen, found = random.Random(1), {chr(code): None for code in range(33, 127)} | {"Ġ": None, "Ċ": None}
    for run in itertools.chain(itertools.product(_MARKS, repeat=2), itertools.product(_MARKS, repeat=3)):
        found |= {"".join(run): None, "Ġ" + "".join(run): None}
    while len(found) < size:
        word = "".join(chosen.choices(_LETTERS, range(52, 0, -2), k=1 + min(11, int(chosen.expovariate(0.22)))))
        found["Ġ" * (chosen.random() < 0.5) + (word.capitalize() if chosen.random() < 0.2 else word)] = None
    return list(found)[:size]


def with_words(config: Path, target: Path) -> Path:
    """The packed model of a shape with such a vocabulary, written where it is missing."""
    if not target.exists():
        tell(f"writing {target.name}")
        synth(config, target, parse_format("int4"))
        file = target / "tokenizer.json"  # not the one that was packed, so the server is told not to compare it
        tokenizer = json.loads(file.read_text())
        special = {each["id"] for each in tokenizer["added_tokens"]}
        size = open_packed(target, False).spec.vocab
        tokenizer["model"]["vocab"] = dict(
            zip(vocabulary(size), (i for i in range(size) if i not in special), strict=False)
        )
        file.write_text(json.dumps(tokenizer))
    return target


class Held(Stream):
    """A stream that is held to the schema, or is not. It asks for no log probabilities, which would cost more than
    masks."""

    held = False
    temperature = 0.0

    def body(self) -> dict[str, Any]:
        how: dict[str, Any] = {"ignore_eos": True}
        if self.held:
            how = {"response_format": {"type": "json_schema", "json_schema": {"name": "records", "schema": SCHEMA}}}
        return {
            "prompt": list(self.prompt), "max_tokens": self.max_tokens, "stream": True, "seed": self.prompt[-1],
            "temperature": self.temperature, **how,
        }  # fmt: skip


def speed(server: Server, held: bool, temperature: float) -> tuple[float, float]:
    """(tokens/s of eight streams together, processor seconds of the server and its child for a token). Each stream asks
    again when its answer ends."""

    def ask(client: int, turn: int) -> Stream:
        # Their first answers are shorter, each by another length, so that they do not all end in the same pass.
        stream = Held([65 + client, 70 + turn % 50], ANSWER_TOKENS - (45 * client if turn == 0 else 0))
        stream.held, stream.temperature = held, temperature
        return stream

    with kept_busy(server, ask, STREAMS):
        before_s, tokens = server.cpu_s(), server.gauge("output_tokens_total")
        found = counted_tokens_per_s(server, TURN_S)
        spent_s = (server.cpu_s() - before_s) / (server.gauge("output_tokens_total") - tokens)
    server.settle()
    return found, spent_s


def measure(config: Path, folder: Path, turns: int) -> dict[str, Any]:
    """`masks_cost_at_1`: the share of the speed that masks take at temperature 1, the median over turns of
    1 - with / without. `…_at_0`: greedily. `masks_cpu_cost_…`: the same of tokens for a processor second, which says
    more where others disturb."""
    model = with_words(config, folder / f"{config.stem}-int4-words")
    flags = ("--batch", STREAMS, "--context", CONTEXT, "--prompt-tokens", 4, "--output-tokens", ANSWER_TOKENS)
    figures: dict[str, Any] = {}
    with served(folder, model, None, *flags, "--no-verify") as server:
        for held in (False, True):
            speed(server, held, 1.0)  # not counted
        for temperature in (1.0, 0.0):
            costs, cpu_costs, speeds = [], [], []
            for turn in range(turns):
                order = (False, True) if turn % 2 == 0 else (True, False)
                found = {held: speed(server, held, temperature) for held in order}
                (plain, plain_s), (masked, masked_s) = found[False], found[True]
                costs.append(1 - masked / plain)
                cpu_costs.append(1 - plain_s / masked_s)
                speeds.append(plain)
                spent = f"{1000 * plain_s:.2f} and {1000 * masked_s:.2f} ms of processor time a token"
                tell(f"temperature {temperature:g}: {plain:.1f} tokens/s, {masked:.1f} with masks; {spent}")
            name = f"at_{temperature:g}"
            figures |= {
                f"masks_cost_{name}": statistics.median(costs), f"masks_costs_{name}": costs,
                f"masks_cpu_cost_{name}": statistics.median(cpu_costs), f"masks_cpu_costs_{name}": cpu_costs,
                f"tokens_per_s_{name}": statistics.median(speeds),
            }  # fmt: skip
    return figures
