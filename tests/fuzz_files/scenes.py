"""Which commands read a seed's file, with which flags, and a case made of both."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz_files.corpus import Seed
from tests.fuzz_files.mutate import mutant
from tests.fuzz_files.places import (
    Placing,
    as_a_gguf_file,
    as_the_config,
    as_the_history,
    as_the_index,
    as_the_machine,
    as_the_manifest,
    as_the_profile,
    as_the_shard,
    as_the_weights,
    beside_the_weights,
    given,
    half_packed,
    in_the_pack,
)
from tests.fuzz_files.world import Place, World, put

# {model}, {in}, {out}: folders of the case; {file}: the seed's own file.
Command = tuple[str, ...]

_RUN: Command = ("run", "{model}", "hello", "--max-tokens", "2", "--json")
_RAW: Command = (*_RUN, "--raw")
_PLAN: Command = ("plan", "{model}", "--json")
_PACK: Command = ("pack", "{model}", "{out}/packed", "--json")
_VERIFY: Command = ("pack", "{model}", "--verify", "--json")
_EVAL: Command = ("eval", "{model}", "{in}/text.txt", "--json")
_SYNTH: Command = ("synth", "{model}", "{out}/synth", "--json")

_ASK = (
    ("--host-memory", "200MiB"), ("--host-memory", "90MiB"), ("--resident", "0"), ("--resident", "20KiB"),
    ("--kv", "int4"), ("--kv", "int8"), ("--kv-home", "disk"), ("--batch", "3"), ("--context", "32"),
    ("--context", "1"), ("--device", "none"), ("--device", "emulated"), ("--objective", "throughput"),
    ("--device", "emulated", "--device-memory", "1MiB"), ("--prompt-tokens", "40"), ("--output-tokens", "9"),
    ("--sparsity", "off"), ("--sparsity", "threshold"), ("--sparsity", "predict"),
)  # fmt: skip
_FORMATS = (("--weights", "int4"), ("--weights", "int8"), ("--weights", "float32"), ("--weights", "float16"))
_SAMPLING = (
    ("--temperature", "0.8", "--seed", "1"), ("--top-k", "3"), ("--top-p", "0.5"), ("--min-p", "0.1"), ("--stop", "a"),
    ("--repetition-penalty", "1.2"), ("--ignore-eos",), ("--threads", "1"), ("--exact",), ("--no-verify",),
    ("--trace", "{out}/trace.json"), ("--trace", "{file}"), ("--max-tokens", "9"),
)  # fmt: skip
_FLAGS: dict[str, tuple[tuple[str, ...], ...]] = {
    "run": (*_ASK, *_FORMATS, *_SAMPLING),
    "plan": (
        *(*_ASK, *_FORMATS, ("--compare",), ("--svg", "{out}/plan.svg"), ("--svg", "{file}"), ("--trace", "{file}")),
        *(("--machine", name) for name in ("pc-rtx4090-64gb", "pc-16gb-sata")),
    ),
    "eval": (
        ("--kv", "int4"),
        ("--host-memory", "200MiB"),
        ("--against", "{model}"),
        ("--device", "emulated"),
        ("--no-verify",),
    ),
    "pack": (*_FORMATS, ("--verify",), ("--spread", "{out}/second")),
    "synth": (*_FORMATS, ("--seed", "7"), ("--activation-rate", "zipf:1")),
}


@dataclass(frozen=True)
class Scene:
    """Where files of a kind may lie, and the commands that read them there. `others`: places where a seed as it is need
    not work."""

    places: tuple[Placing, ...]
    commands: tuple[Command, ...]
    others: tuple[Placing, ...] = ()

    @property
    def unchanged(self) -> int:
        """So many cases of a seed are the seed as it is: each of its commands in each place."""
        return len(self.places) * len(self.commands)


@dataclass(frozen=True)
class Case:
    """`name`: `config/good-llama.json:17`, from which the same files and command come again."""

    name: str
    argv: tuple[str, ...]
    cwd: Path
    stdin: Path | None
    file: Path
    changed: bool


def _texts(name: str) -> tuple[Placing, ...]:
    return (in_the_pack(name), beside_the_weights(name))


SCENES: dict[str, Scene] = {
    "config": Scene((as_the_config,), (_PLAN, _RUN, _PACK, _SYNTH, ("plan", "{file}")), (in_the_pack("config.json"),)),
    "shard": Scene((as_the_weights,), (_PACK, _RUN)),
    "index": Scene((as_the_index,), (_PACK, _RUN)),
    "gguf": Scene(
        (as_a_gguf_file,),
        (
            ("run", "{file}", "hello", "--max-tokens", "2", "--json"),
            ("plan", "{file}", "--json"),
            ("pack", "{file}", "{out}/packed", "--json"),
        ),
    ),
    "tokenizer": Scene(_texts("tokenizer.json"), (_RUN, _RAW, _EVAL)),
    "tokenizer_config": Scene(_texts("tokenizer_config.json"), (_RUN,)),
    "generation_config": Scene(_texts("generation_config.json"), (_RUN,)),
    "special_tokens_map": Scene(_texts("special_tokens_map.json"), (_RUN,)),
    "template": Scene(_texts("chat_template.jinja"), (_RUN,)),
    "manifest": Scene((as_the_manifest,), (_RUN, _PLAN, _VERIFY, _EVAL)),
    "sums": Scene((in_the_pack("penstock.sums"),), (_RUN, _VERIFY)),
    "packed_shard": Scene((as_the_shard,), (_RUN, _VERIFY)),
    "resume": Scene((half_packed,), ((*_PACK, "--weights", "int4"),)),
    "machine": Scene(
        (as_the_machine,),
        (
            ("plan", "{model}", "--machine", "{file}", "--json"),
            ("plan", "llama-3.2-1b", "--weights", "int4", "--host-memory", "900MiB", "--machine", "{file}", "--json"),
            ("plan", "{model}", "--compare"),
            _RUN,
            ("probe", "--json"),
        ),
    ),
    "plan": Scene((given("plan.json"),), ((*_RUN, "--plan", "{file}"), (*_EVAL, "--plan", "{file}"))),
    "profile": Scene((as_the_profile,), (_PLAN, _RUN, ("plan", "{model}", "--resident", "0", "--json"))),
    "levels": Scene(
        (as_the_profile,), ((*_PLAN, "--sparsity", "threshold"), (*_RUN, "--sparsity", "threshold"), _PLAN, _RUN)
    ),
    "answers": Scene(
        (given("answers.json"),),
        (
            ("plan", "{model}", "--answers", "{file}", "--json"),
            ("plan", "{model}", "--resident", "0", "--answers", "{file}", "--json"),
        ),
    ),
    "history": Scene((as_the_history,), (_PLAN, ("bench", "--calibrate", "--json"), (*_RUN, "--max-tokens", "9"))),
    "text": Scene((given("text.txt"),), (_EVAL, ("run", "{model}", "--max-tokens", "2", "--raw", "--json"))),
}


def case(world: World, place: Place, seed: Seed, number: int, family: list[Seed]) -> Case:
    """Writes case `number` of a seed into `place`. The first ones are the seed as it is."""
    scene = SCENES[seed.kind]
    name = f"{seed.name}:{number}"
    rng = random.Random(name)
    place.clear()
    changed = number >= scene.unchanged
    content = mutant(rng, seed, family) if changed else seed.content
    if changed:
        placing, command = rng.choice((*scene.places, *scene.others)), rng.choice(scene.commands)
    else:
        placing, command = scene.places[number // len(scene.commands)], scene.commands[number % len(scene.commands)]
    file = placing(rng if changed else _Certain(), world, place, seed, content)
    if changed:
        if rng.random() < 0.02:
            _no_plain_file(rng, file)
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            command += rng.choice(_FLAGS.get(command[0], ((),)))
    cwd = place.cwd
    if changed and rng.random() < 0.1:  # where the user stands is the model's folder
        for trap in place.cwd.rglob("*.py"):
            put(place.model / trap.relative_to(place.cwd), trap.read_bytes())
        cwd = place.model
    names = {"model": "." if cwd == place.model else place.model, "in": place.given, "out": place.out, "file": file}
    argv = tuple(word.format(**names) for word in command)
    stdin = file if seed.kind == "text" and file.is_file() and not file.is_symlink() else None
    return Case(name, argv, cwd, stdin, file, changed)


class _Certain(random.Random):
    """For a seed as it is: what is done most often."""

    def random(self) -> float:
        return 0.5


def _no_plain_file(rng: random.Random, file: Path) -> None:
    """Something else where the file should be."""
    file.unlink()
    what = rng.randrange(7)
    if what == 0:
        os.mkfifo(file)
    elif what == 1:
        file.mkdir()
    elif what == 2:
        file.symlink_to("/dev/zero")
    elif what == 3:
        file.symlink_to(file)
    elif what == 4:
        file.symlink_to("/nowhere/at/all")
    elif what == 5:
        file.touch()
        os.truncate(file, 1 << 40)  # a terabyte of holes
