"""PIPO's memory model (section 3.5, appendix B) and its automatic configuration (Eq. 1), as pure functions.

Letters are the paper's: l layers, d width, d_h neurons, h heads, h_kv KV heads, V vocabulary, b sequences, s tokens of
prompt and answer. Its one precision p is three here: of weights, of activations, of KV. Where text and appendix differ
(bench/papers/contradictions.py): W_mha is the appendix's, with K and V both; KV buffers are the text's, 2C/l while
attention computes and C/l beside an FFN where the next block is preloaded, the safer bound; scores of a decode step
take p·b·h·s bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.spec.format import Format
from penstock.spec.machine import MachineSpec
from penstock.spec.model import ModelSpec
from penstock.spec.parts import head_key, parts
from penstock.spec.plan import DEVICE

HOMES = (DEVICE, "host", "disk0")
PIPELINES = ("overlapped", "saving")  # performance-optimised, memory-efficient: orders of spec.plan


@dataclass(frozen=True)
class Sizes:
    """A model in the paper's letters. `attention`: h heads times their width, d in LLaMA and OPT. `matrices`: of an
    FFN, 3 where it is gated, 2 else; as many hidden vectors are counted. `embeddings`: 2, or 1 where the head is tied.
    The three precisions in bytes."""

    layers: int
    d: int
    attention: int
    hidden: int
    matrices: int
    heads: int
    kv_heads: int
    vocab: int
    embeddings: int
    weight_bytes: float
    act_bytes: float
    kv_bytes: float

    @property
    def mha_bytes(self) -> float:
        """W_mha."""
        kv = self.attention * self.kv_heads / self.heads
        return self.weight_bytes * self.d * (2 * self.attention + 2 * kv + 1)

    @property
    def mlp_bytes(self) -> float:
        """W_mlp."""
        return self.weight_bytes * self.d * (self.matrices * self.hidden + 1)

    @property
    def embed_bytes(self) -> float:
        """W_embed: of the embedding, or of the head."""
        return self.weight_bytes * self.d * self.vocab

    @property
    def weights_bytes(self) -> float:
        """W: all of them."""
        return self.embeddings * self.embed_bytes + self.layers * (self.mha_bytes + self.mlp_bytes)

    def kv_total_bytes(self, batch: int, tokens: int) -> float:
        """C = 2·p·b·s·l·d·h_kv/h."""
        return 2 * self.kv_bytes * batch * tokens * self.layers * self.attention * self.kv_heads / self.heads


@dataclass(frozen=True)
class Peaks:
    """Bytes of device memory while attention, an FFN or the head computes: M_mha, M_mlp, M_embed."""

    mha: float
    mlp: float
    embed: float

    @property
    def peak(self) -> float:
        """M."""
        return max(self.mha, self.mlp, self.embed)


@dataclass(frozen=True)
class Limits:
    """M_GPU and M_CPU in bytes; seconds a byte over the link, from the disk, and of computing from device memory."""

    device_bytes: float
    host_bytes: float
    link_s_per_byte: float
    disk_s_per_byte: float
    compute_s_per_byte: float


@dataclass(frozen=True)
class Choice:
    """`home` of all weights but the share `on_device`, which is at home on the device; `pipeline`: the plan's order."""

    home: str
    pipeline: str
    on_device: float = 0.0


def sizes(spec: ModelSpec, weights: Format, kv: Format) -> Sizes:
    """A model's, by its first layer. Activations in half precision (section 4.1), float32 of a float32 model.
    Integer formats count with their scales and minimums."""
    a, f = spec.layers[0].attention, spec.layers[0].ffn
    scales = 32 / weights.group if weights.group else 0.0
    return Sizes(
        layers=len(spec.layers), d=spec.d_model, attention=a.heads * a.head_dim, hidden=f.neurons,
        matrices=3 if f.gated else 2, heads=a.heads, kv_heads=a.kv_heads, vocab=spec.vocab,
        embeddings=1 if spec.tied else 2, weight_bytes=(weights.bits + scales) / 8,
        act_bytes=4 if spec.dtype == "float32" else 2, kv_bytes=kv.kv_bytes(a.head_dim) / a.head_dim,
    )  # fmt: skip


def peaks(s: Sizes, batch: int, tokens: int, stage: str, preloading: bool) -> Peaks:
    """Appendix B.1 (`stage` "prefill") and B.2 ("decode"), with and without preloading."""
    rows = batch * (tokens if stage == "prefill" else 1)
    inputs = outputs = s.act_bytes * rows * s.d
    qkv = 3 * s.act_bytes * rows * s.attention
    hidden = s.act_bytes * rows * s.hidden
    scores = s.act_bytes * rows * s.heads * tokens
    logits = s.act_bytes * rows * s.vocab
    kv_layer = s.kv_total_bytes(batch, tokens) / s.layers
    mha = inputs + qkv + scores + outputs + s.mha_bytes + kv_layer
    mlp = inputs + s.matrices * hidden + outputs + s.mlp_bytes
    embed = inputs + logits + s.embed_bytes
    if preloading:
        mha += s.mlp_bytes + kv_layer
        mlp += s.mha_bytes + kv_layer
        embed += max(s.mha_bytes, s.embed_bytes)
    return Peaks(mha, mlp, embed)


def peak_bytes(s: Sizes, batch: int, tokens: int, pipeline: str) -> float:
    """M of a pipeline: of prefill, which needs the most."""
    return peaks(s, batch, tokens, "prefill", pipeline == "overlapped").peak


def equation_1(s: Sizes, batch: int, tokens: int, limits: Limits) -> Choice:
    """The configuration as published. It asks for no more than its lines say: the disk is what is left."""
    need, kv = peak_bytes(s, batch, tokens, "overlapped"), s.kv_total_bytes(batch, tokens)
    if s.weights_bytes + need < limits.device_bytes:
        home = DEVICE
    elif s.weights_bytes + kv < limits.host_bytes and limits.disk_s_per_byte > limits.link_s_per_byte:
        home = "host"
    else:
        home = "disk0"
    return Choice(home, "overlapped" if need < limits.device_bytes else "saving", float(home == DEVICE))


def fits(s: Sizes, batch: int, tokens: int, choice: Choice, limits: Limits) -> bool:
    """By the memory model: M, and weights that stay, on the device; KV (section 3.1.1), and weights there, in RAM."""
    on_device = peak_bytes(s, batch, tokens, choice.pipeline) + choice.on_device * s.weights_bytes
    rest = (1 - choice.on_device) * s.weights_bytes if choice.home == "host" else 0.0
    return on_device < limits.device_bytes and s.kv_total_bytes(batch, tokens) + rest < limits.host_bytes


def token_s(s: Sizes, batch: int, tokens: int, choice: Choice, limits: Limits) -> float:
    """Seconds of a decode step that Eq. 1 goes by: loads beside computing, or one after the other. What comes from the
    disk crosses the link too, blockwise, so the slower of the two counts; so does KV (section 3.1.1)."""
    away = (1 - choice.on_device) * s.weights_bytes
    load_s = (away + s.kv_total_bytes(batch, tokens)) * limits.link_s_per_byte
    if choice.home == "disk0":
        load_s = max(load_s, away * limits.disk_s_per_byte)
    compute_s = s.weights_bytes * limits.compute_s_per_byte
    return max(load_s, compute_s) if choice.pipeline == "overlapped" else load_s + compute_s


def choose(s: Sizes, batch: int, tokens: int, limits: Limits) -> Choice | None:
    """The fastest home and pipeline that fit; None where none does. For each pipeline the nearest home that fits is the
    best, so two of the six are compared. Equal to Eq. 1, but where memory holds all weights beside the peak without
    preloading and not beside the one with it: Eq. 1 then moves them off the device."""
    found = [nearest for pipeline in PIPELINES for nearest in _nearest(s, batch, tokens, pipeline, limits)]
    return min(found, key=lambda choice: token_s(s, batch, tokens, choice, limits), default=None)


def _nearest(s: Sizes, batch: int, tokens: int, pipeline: str, limits: Limits) -> Iterator[Choice]:
    """The nearest home that fits, RAM only where the link is faster than the disk."""
    for home in HOMES:
        choice = Choice(home, pipeline, float(home == DEVICE))
        useful = home != "host" or limits.disk_s_per_byte > limits.link_s_per_byte
        if useful and fits(s, batch, tokens, choice, limits):
            yield choice
            return


def device_share(s: Sizes, batch: int, tokens: int, pipeline: str, limits: Limits) -> float:
    """Partial offloading (appendix C.5): the share of the weights that the device holds beside M."""
    spare = limits.device_bytes - peak_bytes(s, batch, tokens, pipeline)
    return min(1.0, max(0.0, spare / s.weights_bytes))


def limits_of(machine: MachineSpec, weights: Format, device_bytes: int, host_bytes: int, batch: int) -> Limits:
    """With the machine's own rates of a lift, of a load and of an FFN of `batch` rows on the device: the slower of its
    two regimes."""
    compute = machine.rate(DEVICE, "ffn", weights.kind, batch)
    flops_per_byte = 2 * batch * 8 / weights.bits
    return Limits(
        device_bytes, host_bytes,
        machine.rate("h2d0", "lift", weights.kind).s_per_byte,
        machine.rate("disk0", "load", weights.kind).s_per_byte,
        max(compute.s_per_byte, compute.s_per_flop * flops_per_byte),
    )  # fmt: skip


def block_bytes(spec: ModelSpec, weights: Format) -> tuple[int, int]:
    """As packed: the largest block (a layer's attention or FFN), and the largest two that follow each other. Of a
    vocabulary a granule counts: it may come in many units."""
    blocks = [p.nbytes for p in parts(spec, weights) if p.kind in ("attn", "ffn")]
    granule = next(p.granule_bytes for p in parts(spec, weights) if p.key == head_key(spec))
    pairs = [a + b for a, b in zip(blocks, [*blocks[1:], blocks[0]], strict=True)]
    return max(*blocks, granule), max(*pairs, 2 * granule)
