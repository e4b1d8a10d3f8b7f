"""PIPO's memory model (section 3.5, appendix B) and its automatic configuration (Eq. 1), as pure functions.

Letters are the paper's: l layers, d width, d_h neurons, h heads, h_kv KV heads, V vocabulary, b sequences, s tokens of
prompt and answer. Its one precision p is three here: of weights, of activations, of KV. Text and appendix differ in
places (bench/papers/data/contradictions.tsv): W_mha is the appendix's, with K and V both; KV buffers are the text's,
2C/l while attention computes and C/l beside an FFN where the next block is preloaded, the safer bound; scores of a
decode step take p·b·h·s bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.planner.solve.problem import Problem
from penstock.spec.format import Format
from penstock.spec.model import ModelSpec
from penstock.spec.places import DISK, GPU, HOST, Tier

HOMES = (GPU.executor, HOST, DISK.tier)
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
    """M_GPU and M_CPU in bytes; bytes a second over the link, and from the disk."""

    device_bytes: float
    host_bytes: float
    link_bytes_per_s: float
    disk_bytes_per_s: float

    @property
    def link_is_faster(self) -> bool:
        """Than the disk: otherwise weights in RAM are no nearer."""
        return self.link_bytes_per_s > self.disk_bytes_per_s


@dataclass(frozen=True)
class Choice:
    """`home` of all weights but the share `on_device`, which is at home on the device; `pipeline`: the plan's order."""

    home: Tier
    pipeline: str
    on_device: float = 0.0


def sizes(spec: ModelSpec, weights: Format, kv: Format) -> Sizes:
    """A model's, by its first layer. Activations in half precision (section 4.1), float32 of a float32 model.
    Integer formats count with their scales and minimums."""
    a, f = spec.layers[0].attention, spec.layers[0].ffns[0]
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
        home: Tier = GPU.executor
    elif s.weights_bytes + kv < limits.host_bytes and limits.link_is_faster:
        home = HOST
    else:
        home = DISK.tier
    return Choice(home, "overlapped" if need < limits.device_bytes else "saving", float(home == GPU.executor))


def limits_of(problem: Problem) -> Limits:
    """What may be taken of both memories; the machine's own rates of a lift, and of a load."""
    link, disk = (problem.cost.bytes_per_s(lane, op, problem.weights.kind) for lane, op in _MOVES)
    return Limits(problem.device_bytes, problem.host_bytes, link, disk)


_MOVES = ((GPU.to_device, "lift"), (DISK.reads, "load"))


def block_bytes(problem: Problem) -> tuple[int, int]:
    """As packed: the largest block (a layer's attention or FFN), and the largest two that follow each other. Of a
    vocabulary a granule counts: it may come in many units."""
    blocks = [part.nbytes for part in problem.parts.values() if part.kind in ("attn", "ffn")]
    granule = problem.head.granule_bytes
    pairs = [a + b for a, b in zip(blocks, [*blocks[1:], blocks[0]], strict=True)]
    return max(*blocks, granule), max(*pairs, 2 * granule)
