"""Where a seed's file goes among the honest ones."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from penstock.runtime.probe import machine_file
from penstock.store import manifest as manifests
from penstock.store import profile_file
from tests.fuzz_files.corpus import Seed
from tests.fuzz_files.mutate import of_bytes
from tests.fuzz_files.world import Files, Place, World, put, put_all

# Writes a case's files with `content` as the seed's own, and returns that one.
Placing = Callable[[random.Random, World, Place, Seed, bytes], Path]

_TEXT = b"It was a dark and stormy night; the rain fell in torrents, and the wind rattled along the housetops."
SHARD = "model-00001.safetensors"
_SEAL = re.compile(rb',\s*"sha256": "[^"]*"\s*}\s*\Z')


def beside_the_weights(name: str) -> Placing:
    """Into the checkpoint's folder, over the honest file of that name."""

    def place(rng: random.Random, world: World, place: Place, seed: Seed, content: bytes) -> Path:
        put_all(place.model, world.base)
        put(place.given / "text.txt", _TEXT)
        return put(place.model / name, content)

    return place


def as_the_weights(rng: random.Random, world: World, place: Place, seed: Seed, content: bytes) -> Path:
    """model.safetensors, beside the config that the seed's name says."""
    put_all(place.model, world.experts if "experts" in seed.path.name else world.base)
    return put(place.model / "model.safetensors", content)


def in_the_pack(name: str) -> Placing:
    """Into the packed model, most often as somebody would who makes all checksums fit."""

    def place(rng: random.Random, world: World, place: Place, seed: Seed, content: bytes) -> Path:
        put(place.given / "text.txt", _TEXT)
        put_all(place.model, world.packed)
        file = put(place.model / name, content)
        if rng.random() < 0.9:
            put(place.model / manifests.FILE, _listing(world.packed, name, content))
        return file

    return place


def as_a_gguf_file(rng: random.Random, world: World, place: Place, seed: Seed, content: bytes) -> Path:
    """model.gguf, alone in its folder."""
    return put(place.model / "model.gguf", content)


def as_the_manifest(rng: random.Random, world: World, place: Place, seed: Seed, content: bytes) -> Path:
    """penstock.json with a checksum of its own that fits, most often: behind it is the rest of its checks."""
    put(place.given / "text.txt", _TEXT)
    put_all(place.model, world.packed)
    if content != seed.content and rng.random() < 0.9:
        content = _sealed(content)
    return put(place.model / manifests.FILE, content)


def as_the_shard(rng: random.Random, world: World, place: Place, seed: Seed, content: bytes) -> Path:
    """The seed is a packed shard's header, which is padded to a page; the parts follow, damaged now and then."""
    put_all(place.model, world.packed)
    put(place.given / "text.txt", _TEXT)
    whole = world.packed[SHARD]
    length = 8 + int.from_bytes(whole[:8], "little")
    parts = whole[length:]
    if content != seed.content and rng.random() < 0.3:
        content, parts = seed.content, of_bytes(rng, parts, whole)
    return put(place.model / SHARD, content.ljust(length) + parts)


def as_the_config(rng: random.Random, world: World, place: Place, seed: Seed, content: bytes) -> Path:
    """Beside weights that fit the seed as it was, where it was a model's."""
    put_all(place.model, world.checkpoint_of(seed) if seed.path.name.startswith("good-") else world.base)
    return put(place.model / "config.json", content)


def as_the_index(rng: random.Random, world: World, place: Place, seed: Seed, content: bytes) -> Path:
    put_all(place.model, world.sharded)
    return put(place.model / "model.safetensors.index.json", content)


def half_packed(rng: random.Random, world: World, place: Place, seed: Seed, content: bytes) -> Path:
    """resume.json of a packing that was interrupted after its only shard."""
    put_all(place.model, world.base)
    partial = place.out / "packed.partial"
    put(partial / SHARD, world.packed[SHARD])
    return put(partial / "resume.json", content)


def given(name: str) -> Placing:
    """A file that a flag names, beside the packed model that the seed's name says."""

    def place(rng: random.Random, world: World, place: Place, seed: Seed, content: bytes) -> Path:
        put_all(place.model, world.packed_of(seed))
        return put(place.given / name, content)

    return place


def as_the_profile(rng: random.Random, world: World, place: Place, seed: Seed, content: bytes) -> Path:
    """Beside the packed weights of a model that has what is told: levels, neurons that fire, or routers."""
    if seed.kind == "levels":
        put_all(place.model, world.packed)
    else:
        put_all(place.model, world.packed_neurons if "neurons" in seed.path.name else world.packed_experts)
    return put(place.model / profile_file.FILE, content)


def as_the_machine(rng: random.Random, world: World, place: Place, seed: Seed, content: bytes) -> Path:
    """Both the machine that a flag names and the one in the cache, as kept by an earlier probe."""
    put_all(place.model, world.packed)
    put(machine_file(place.cache), content)
    return put(place.given / "machine.json", content)


def as_the_history(rng: random.Random, world: World, place: Place, seed: Seed, content: bytes) -> Path:
    put_all(place.model, world.packed)
    return put(machine_file(place.cache).with_suffix(".runs.jsonl"), content)


def _listing(packed: Files, name: str, content: bytes) -> bytes:
    """penstock.json of a pack with another file of that name."""
    listed = json.loads(packed[manifests.FILE])
    files = [file for file in listed["files"] if file["name"] != name]
    listed["files"] = [*files, asdict(manifests.describe_file(name, content))]
    del listed["sha256"]
    return manifests.seal(json.dumps(listed, indent=1)).encode()


def _sealed(text: bytes) -> bytes:
    """A JSON object's text, its own checksum made anew as its last field."""
    body = _SEAL.sub(b"}", text).rstrip().removesuffix(b"}")
    return manifests.seal(body.decode("utf-8", "replace") + "\n}").encode()
