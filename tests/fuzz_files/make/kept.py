"""Seeds of what penstock writes itself: manifests, the state of a packing, plans, machines, the history of runs.

They follow the versions of those files: after a change of one make them again.
"""

from __future__ import annotations

import contextlib
import io
import json
from array import array
from base64 import b64encode
from pathlib import Path
from typing import Any
from unittest import mock
from zlib import compress

import penstock
from penstock.cli.main import main
from penstock.graph.arenas import with_arenas
from penstock.graph.cache import POLICIES
from penstock.spec import answers as answers_format
from penstock.spec import machine as machines
from penstock.spec import plan as plan_files
from penstock.spec import profile as profile_format
from penstock.spec.live_sets import LiveSets, row_bytes
from penstock.spec.machine import Capacity, MachineSpec, Rate, Reads, Sharing
from penstock.spec.profile import Counting, FiringCounts, LayerLevel, Profile
from penstock.store import writer
from penstock.store.manifest import seal
from tests.fuzz_files.world import MOE, RELU, Files, World, put_all

_FLOPS = 2e-11
_RATES = (
    Rate("host", "*", "*", 1e-5, 1e-10, _FLOPS),
    Rate("host", "ffn", "int4", 8e-6, 4e-11, _FLOPS, 0.99, 4),
    Rate("host", "ffn", "int4", 9e-6, 5e-11, _FLOPS / 2, 0.98),
    Rate("host", "attend", "float16", 6e-6, 1e-10, _FLOPS),
    Rate("disk0", "*", "*", 1e-4, 5e-10),
)
_TIERS = (Capacity("host", 1 << 34), Capacity("disk0", 1 << 40))
_DEVICE = tuple(Rate(lane, "*", "*", 1e-5, 5e-11, 1e-13) for lane in ("gpu0", "h2d0", "d2h0"))
_TWO_CORES = MachineSpec("two cores", _TIERS, _RATES, 2, source="made up")


def machine_files() -> Files:
    """Figures made up; one of a machine that comes with penstock."""
    sharing = (Sharing("host", "disk0", 1.2), Sharing("disk0", "host", 1.3))
    reads = (
        Reads("disk0", 1 << 20, 2, "threads", 2e9, "measured"),
        Reads("disk0", 4096, 8, "io_uring", 1e9, "", 1 << 16),
    )
    good = {
        "two-cores": _TWO_CORES,
        "sharing": MachineSpec("sharing", _TIERS, _RATES, 2, sharing=sharing, reads=reads),
        "gpu": MachineSpec("gpu", (*_TIERS, Capacity("gpu0", 1 << 30)), (*_RATES, *_DEVICE), 8, context_bytes=1 << 28),
    }
    found = {f"good-{name}.json": machines.dumps(machine).encode() for name, machine in good.items()}
    bundled = Path(penstock.__file__).parent / "machines" / "pc-16gb-sata.json"
    found["good-bundled.json"] = bundled.read_bytes()
    plain = json.loads(found["good-two-cores.json"])
    changes: dict[str, dict[str, Any]] = {
        "odd-slow": {"rates": [{**rate, "s_per_byte": 1e6, "alpha_s": 1e6} for rate in plain["rates"]]},
        "odd-fast": {
            "rates": [{**rate, "s_per_byte": 1e-18, "s_per_flop": 0, "alpha_s": 0} for rate in plain["rates"]]
        },
        "odd-threads": {"threads": 2**31 - 1},
        "odd-small": {"tiers": [{"name": "host", "bytes": 1}, {"name": "disk0", "bytes": 1}]},
        "odd-large": {"tiers": [{"name": "host", "bytes": 2**63 - 1}, {"name": "disk0", "bytes": 2**63 - 1}]},
        "odd-process": {"process_bytes": 2**62},
        "odd-version": {"schema": "penstock.machine/99"},
        "odd-no-rates": {"rates": []},
        "odd-name": {"name": "\x1b[2J\n" + "m" * 3000},
        "bad-half-a-character": {"name": "\ud800"},
        "odd-many-rates": {"rates": [{**plain["rates"][0], "rows": i} for i in range(1, 40)] + plain["rates"]},
    }
    return found | {f"{name}.json": json.dumps({**plain, **change}).encode() for name, change in changes.items()}


def manifests(world: World) -> Files:
    """penstock.json of the packed llama; a name, an offset or a number wrong."""
    text = world.packed["penstock.json"]
    good = json.loads(text)
    del good["sha256"]
    old = {"schema": "penstock.packed/2", **{name: good[name] for name in ("weights", "total_bytes")}}
    listed: list[dict[str, Any]] = good["files"]

    def part(i: int, **changes: Any) -> dict[str, Any]:
        parts = [{**p, **changes} if k == i else p for k, p in enumerate(good["parts"])]
        return {**good, "parts": parts}

    found: dict[str, Any] = {
        "bad-version": {**good, "schema": "penstock.packed/0"},
        "bad-weights": {**good, "weights": "int5"},
        "bad-weights-other": {**good, "weights": "int8"},
        "bad-total": {**good, "total_bytes": good["total_bytes"] + 1},
        "bad-no-parts": {**good, "parts": []},
        "bad-order": {**good, "parts": good["parts"][::-1]},
        "bad-twice": {**good, "parts": [*good["parts"], good["parts"][0]]},
        "bad-file-path": part(0, file="../model-00001.safetensors"),
        "bad-file-other": part(0, file="model-00002.safetensors"),
        "bad-offset": part(1, offset=-4096),
        "bad-offset-far": part(1, offset=2**62),
        "bad-granules": part(0, granules=2**40),
        "bad-granule-bytes": part(0, granule_bytes=0),
        "bad-block": part(0, blocks=[]),
        "bad-key": part(0, key="x" * 3000),
        "bad-files-none": {**good, "files": []},
        "bad-files-path": {**good, "files": [*listed, {**listed[0], "name": "../in/text.txt"}]},
        "bad-files-itself": {**good, "files": [*listed, {**listed[0], "name": "penstock.json"}]},
        "bad-files-long": {**good, "files": [{**file, "nbytes": 2**62} for file in listed]},
        "bad-files-twice": {**good, "files": listed * 2},
        "bad-files-missing": {**good, "files": [*listed, {**listed[0], "name": "vocab.json"}]},
    }
    sealed = {name: seal(json.dumps(content, indent=1)).encode() for name, content in found.items()}
    # Of the version without checksums; and one whose own checksum is not its own.
    sealed["odd-version-2"] = json.dumps({**old, "parts": [{**p, "crc32": 0} for p in good["parts"]]}).encode()
    sealed["bad-version-2-files"] = json.dumps({**old, "parts": good["parts"], "files": listed}).encode()
    sealed["bad-seal"] = text.replace(b'"total_bytes"', b'"total_Bytes"')
    return {"good-as-it-is.json": text, **{f"{name}.json": content for name, content in sealed.items()}}


def sums(world: World) -> Files:
    """penstock.sums: 8 bytes of checksum for each granule."""
    good = world.packed["penstock.sums"]
    return {
        "good-as-it-is.sums": good,
        "bad-cut.sums": good[:-8],
        "bad-longer.sums": good + bytes(8),
        "bad-empty.sums": b"",
        "bad-flipped.sums": bytes([good[0] ^ 1]) + good[1:],
        "bad-swapped.sums": good[8:16] + good[:8] + good[16:],
    }


def packed_headers(world: World) -> Files:
    """The header of the packed model's shard, without its padding."""
    whole = world.packed["model-00001.safetensors"]
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    key = next(name for name in header if name != "__metadata__")
    entry = header[key]

    def framed(content: dict[str, Any]) -> bytes:
        return whole[:8] + json.dumps(content, separators=(",", ":")).encode()

    found = {
        "good-as-it-is": whole[: 8 + length].rstrip(),
        "bad-renamed": framed({("renamed" if name == key else name): value for name, value in header.items()}),
        "bad-dtype": framed({**header, key: {**entry, "dtype": "I8"}}),
        "bad-moved": framed({**header, key: {**entry, "data_offsets": [end + 4096 for end in entry["data_offsets"]]}}),
        "bad-length": (4096).to_bytes(8, "little") + whole[8 : 8 + length].rstrip(),
    }
    return {f"{name}.safetensors": content for name, content in found.items()}


def resumes(world: World, folder: Path) -> Files:
    """resume.json of a packing whose only shard is done. What cannot be used means to start over."""
    put_all(folder / "model", world.base)
    with mock.patch.object(writer, "_finish", side_effect=OSError("broken off here")):
        assert main(["pack", str(folder / "model"), str(folder / "packed"), "--weights", "int4"]) == 2
    good = json.loads((folder / "packed.partial" / "resume.json").read_bytes())
    shard = next(iter(good["shards"]))
    found: dict[str, Any] = {
        "good-whole": good,
        "good-nothing-done": {**good, "shards": {}},
        "good-other": {**good, "fingerprint": {**good["fingerprint"], "weights": "int8"}},
        "odd-crcs-few": {**good, "shards": {shard: []}},
        "odd-crcs-text": {**good, "shards": {shard: ["x"] * len(good["shards"][shard])}},
        "odd-shards-list": {**good, "shards": [shard]},
        "odd-shard-path": {**good, "shards": {"../../model/config.json": [1, 2]}},
        "odd-text": "resume",
    }
    return {f"{name}.json": json.dumps(content).encode() for name, content in found.items()}


def plans(world: World, folder: Path) -> Files:
    """What `penstock plan --json` says of the packed llama, and of the model with experts, under several wishes."""
    put_all(folder / "model", world.packed)
    put_all(folder / "experts", world.packed_experts)
    (folder / "machine.json").write_bytes(machine_files()["good-two-cores.json"])

    def planned(*flags: str, model: str = "model") -> dict[str, Any]:
        said = io.StringIO()
        argv = ["plan", str(folder / model), "--machine", str(folder / "machine.json"), "--json", *flags]
        with contextlib.redirect_stdout(said):
            assert main(argv) == 0
        found = json.loads(said.getvalue())
        assert isinstance(found["plan"], dict)
        return found["plan"]  # type: ignore[no-any-return]

    plain = planned()
    found = {
        "odd-plain": plain,
        "odd-within-plan": {"plan": plain, "predicted": {}},
        "odd-streams": planned("--resident", "0"),
        "odd-throughput": planned("--batch", "4", "--objective", "throughput", "--resident", "12KiB"),
        "odd-kv-disk": planned("--kv-home", "disk", "--kv", "int8"),
        "bad-version": {**plain, "schema": "penstock.plan/99"},
        "bad-no-units": {**plain, "units": []},
        "bad-arena-2-63": {**plain, "arenas": [{**arena, "bytes": 2**63} for arena in plain["arenas"]]},
        "bad-context": {**plain, "context": 2**40},
        "bad-page": {**plain, "page_tokens": 0},
        "bad-rows": {**plain, "chunk_rows": -1},
        "bad-two-models": {**plain, "models": plain["models"] * 2},
        "bad-io": {**plain, "io_block_bytes": 1, "io_depth": 2**31},
        "odd-experts-plain": planned(model="experts"),
    }
    streams = planned("--resident", "0", model="experts")
    cache: dict[str, Any] = {"layer": 1, "executor": "host", "slots": 2, "policy": POLICIES[0]}
    cached = with_arenas(plan_files.loads(json.dumps({**streams, "caches": [cache]}), "plan"))
    found |= {"odd-experts-streams": streams, "odd-experts-cache": json.loads(plan_files.dumps(cached))}
    guessing = with_arenas(plan_files.loads(json.dumps({**streams, "caches": [{**cache, "guesses": 2}]}), "plan"))
    found["odd-experts-guesses"] = json.loads(plan_files.dumps(guessing))
    changes: dict[str, dict[str, Any]] = {
        "dense": {"layer": 0},
        "layer-far": {"layer": 2**40},
        "layer-negative": {"layer": -1},
        "slots-none": {"slots": 0},
        "slots-many": {"slots": 2**62},
        "policy": {"policy": "random"},
        "guesses-many": {"guesses": 2**40},
        "guesses-negative": {"guesses": -1},
        "device": {"executor": "gpu0"},
        "disk": {"executor": "disk0"},
    }
    for name, change in changes.items():
        found[f"bad-experts-cache-{name}"] = {**found["odd-experts-cache"], "caches": [{**cache, **change}]}
    found["bad-experts-cache-twice"] = {**found["odd-experts-cache"], "caches": [cache, cache]}
    return {f"{name}.json": json.dumps(content).encode() for name, content in found.items()}


def answers() -> Files:
    """What `run --record` kept of the model with experts."""
    tokens = [[0, 1], [1, 2], [0, 2], [1, 2]]
    good = {"schema": f"{answers_format.SCHEMA}/{answers_format.VERSION}", "model": "m", "layers": [[], tokens]}
    found = {
        "good-experts-four-tokens": good,
        "good-experts-guesses": {**good, "guesses": [[], [[], [2, 1], [0]]]},
        "bad-experts-guesses-layers": {**good, "guesses": [[]]},
        "bad-experts-guesses-dense": {**good, "guesses": [[[0, 1]], []]},
        "bad-experts-guesses-far": {**good, "guesses": [[], [[2**40]]]},
        "bad-experts-none": {**good, "layers": [[], []]},
        "bad-experts-dense-layer": {**good, "layers": [tokens, tokens]},
        "bad-experts-far": {**good, "layers": [[], [[1, 2**40]]]},
        "bad-experts-negative": {**good, "layers": [[], [[-1, 1]]]},
        "bad-experts-few": {**good, "layers": [[], [[1]]]},
        "bad-experts-version": {**good, "schema": "penstock.answers/7"},
        "bad-experts-layers": {**good, "layers": [[]] * 1000},
        **_answers_of_neurons(),
    }
    return {f"{name}.json": json.dumps(content).encode() for name, content in found.items()}


def profiles() -> Files:
    """What the routers of the model with experts said to a text."""
    experts = MOE["num_experts"]
    trace = tuple((i % experts, (i + 1) % experts) for i in range(12))
    counting = Counting(1, experts)
    for token in trace:
        counting.token(tuple(sorted(token)))
        counting.guess(token)
    good = json.loads(profile_format.dumps(Profile("a text", "0" * 64, len(trace), (counting.found(),))))
    (layer,) = good["layers"]

    def changed(**changes: Any) -> dict[str, Any]:
        return {**good, "layers": [{**layer, **changes}]}

    found = {
        "good-twelve-tokens": good,
        "good-one-token": changed(trace=layer["trace"][:1]),
        "odd-counts": changed(counts=[2**62] * experts, distances=[0] * experts),
        "bad-version": {**good, "schema": "penstock.profile/99"},
        "bad-guesses": changed(guesses=[[0, 0]]),
        "bad-guesses-far": changed(guesses=[[2**40]]),
        "bad-no-layers": {**good, "layers": []},
        "bad-dense-layer": changed(layer=0),
        "bad-negative": changed(distances=[-1] * experts),
        "bad-few-counts": changed(counts=layer["counts"][:-1]),
        "bad-no-trace": changed(trace=[]),
        "bad-expert-far": changed(trace=[[0, experts]]),
        "bad-expert-twice": changed(trace=[[1, 1]]),
        "bad-long-trace": changed(trace=layer["trace"] * 100),
        "bad-text": changed(trace="trace"),
        **_profiles_of_neurons(),
    }
    return {f"{name}.json": json.dumps(content).encode() for name, content in found.items()}


def _answers_of_neurons() -> dict[str, Any]:
    """What `run --record` kept of the model whose neurons fire or do not, by the names of the seeds."""
    neurons = RELU["ffn_dim"]
    rows = [sum(1 << n for n in range(i, neurons, 3)).to_bytes(row_bytes(neurons), "little") for i in range(4)]
    live = tuple(LiveSets.of(layer, neurons, rows) for layer in range(RELU["num_hidden_layers"]))
    good = json.loads(answers_format.dumps(answers_format.RouterAnswers("m", ((), ()), live=live)))

    def changed(**changes: Any) -> dict[str, Any]:
        return {**good, "live": [{**good["live"][0], **changes}, *good["live"][1:]]}

    none, all_bits, huge = (b64encode(compress(raw)).decode() for raw in (b"", b"\xff" * 36, bytes(1 << 20)))
    return {
        "good-neurons-four-tokens": good,
        "odd-neurons-foretold": {**good, "foretold": True},
        "bad-neurons-layer": changed(layer=1),
        "bad-neurons-others": changed(neurons=8),
        "bad-neurons-tokens": changed(tokens=3),
        "bad-neurons-tokens-far": changed(tokens=2**62),
        "bad-neurons-tokens-negative": changed(tokens=-1),
        "bad-neurons-no-base64": changed(sets="=neurons="),
        "bad-neurons-none": changed(sets=none),
        "bad-neurons-beyond": changed(sets=all_bits),
        "bad-neurons-huge": changed(sets=huge),
        "bad-neurons-one-layer": {**good, "live": good["live"][:1]},
    }


def _profiles_of_neurons() -> dict[str, Any]:
    """What the neurons of that model did with a text, by the names of the seeds."""
    neurons = RELU["ffn_dim"]
    shares = tuple(round(0.1 + 0.05 * i, 2) for i in range(len(profile_format.FIRED_TOGETHER)))
    counted = b64encode(array("I", (n % 13 for n in range(neurons))).tobytes()).decode()
    layers = tuple(FiringCounts(layer, neurons, counted, shares) for layer in range(RELU["num_hidden_layers"]))
    good = json.loads(profile_format.dumps(Profile("a text", "0" * 64, 12, (), layers)))

    def changed(**changes: Any) -> dict[str, Any]:
        return {**good, "neurons": [{**good["neurons"][0], **changes}, *good["neurons"][1:]]}

    return {
        "good-neurons": good,
        "odd-neurons-never": changed(counts=b64encode(bytes(4 * neurons)).decode(), fired=[0.0] * len(shares)),
        "bad-neurons-counts-far": {**good, "tokens": 3},
        "bad-neurons-counts-few": changed(counts=counted[:-8]),
        "bad-neurons-counts-odd": changed(counts=b64encode(bytes(4 * neurons - 1)).decode()),
        "bad-neurons-no-base64": changed(counts="=counts="),
        "bad-neurons-falling": changed(fired=shares[::-1]),
        "bad-neurons-share": changed(fired=[0.5] * (len(shares) - 1) + [1.5]),
        "bad-neurons-shares-few": changed(fired=shares[:-1]),
        "bad-neurons-layer": changed(layer=7),
    }


def levels() -> Files:
    """What counts as zero in the dense model without ReLU, in its profile."""
    kept = tuple(round(0.2 + 0.1 * i, 2) for i in range(len(profile_format.FIRED_TOGETHER)))
    good = json.loads(profile_format.dumps(Profile("a text", "0" * 64, 12, (), (), (LayerLevel(0, 0.01, kept),))))

    def changed(**changes: Any) -> dict[str, Any]:
        return {**good, "levels": [{**good["levels"][0], **changes}]}

    found = {
        "good-hundredth": good,
        "odd-0": changed(level=0.0),
        "odd-most": changed(level=profile_format.MOST_LEVEL),
        "bad-far": changed(level=1e300),
        "bad-negative": changed(level=-1.0),
        "bad-text": changed(level="0.1"),
        "bad-falling": changed(kept=kept[::-1]),
        "bad-layer": changed(layer=1),
        "bad-none": {**good, "levels": []},
    }
    return {f"{name}.json": json.dumps(content).encode() for name, content in found.items()}


def histories() -> Files:
    """Lines of runs, as `serve.history` keeps them. A line that cannot be read counts as not there."""
    run = {
        "plan": "0123456789abcdef", "prompt_tokens": 200, "batch": 1, "predicted_ttft_s": 0.1, "ttft_s": 0.2,
        "predicted_tokens_per_s": 10.0, "tokens_per_s": 5.0, "bound_by": "host", "bound_share": 0.95,
    }  # fmt: skip

    def lines(*runs: dict[str, Any]) -> bytes:
        return "".join(json.dumps(each) + "\n" for each in runs).encode()

    found = {
        "good-three": lines(run, {**run, "tokens_per_s": 6.0}, {**run, "bound_by": "disk0"}),
        "good-many": lines(*({**run, "tokens_per_s": 1.0 + i, "batch": i + 1} for i in range(40))),
        "good-empty": b"",
        "good-cut": lines(run, run)[:-40],
        "good-foreign": b'{"a": 1}\nnot json\n[]\n\x00\n' + lines(run),
        "odd-extremes": lines(*({**run, "tokens_per_s": x, "ttft_s": 1 / x} for x in (1e-300, 1e300, 1e-3, 1e9))),
        "odd-types": lines({**run, "tokens_per_s": "5"}, {**run, "ttft_s": None}, {**run, "bound_by": []}, run),
        "odd-nan": lines(run, {**run, "tokens_per_s": float("nan")}, {**run, "ttft_s": float("inf")}, run),
        "odd-lane": lines(*({**run, "bound_by": "gpu7", "bound_share": 3.0, "batch": -1} for _ in range(5))),
        "odd-utf16": lines(run).decode().encode("utf-16"),
    }
    return {f"{name}.jsonl": content for name, content in found.items()}
