"""PIPO's memory model (section 3.5, appendix B) and its automatic configuration (Eq. 1), as pure functions.

The paper's letters are: l layers, d width, d_h neurons, h heads, h_kv KV heads, V vocabulary, b sequences, s tokens of
prompt and answer. The paper has one precision p. Here are three: of weights, of activations and of KV.

The paper's text and its appendix differ in places (bench/papers/data/contradictions.tsv):
- W_mha is the appendix's, which counts both K and V.
- KV buffers are the text's, which are the safer bound: 2C/l bytes while attention computes, and C/l beside an FFN if
  the next block is preloaded.
- Scores of a decode step take p·b·h·s bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.spec.format import Format
from penstock.spec.model import ModelSpec
from penstock.spec.places import DISK, GPU, HOST, Tier

HOMES = (GPU.executor, HOST, DISK.tier)
# An order of `spec.plan` → the pipeline's name: the performance-optimised and the memory-efficient one.
PIPELINES = {"overlapped": "overlapped", "saving": "memory-saving"}


@dataclass(frozen=True)
class Sizes:
    """A model's sizes.

    attention       heads times their width, which is d in LLaMA and OPT
    hidden          d_h
    matrices        matrices of an FFN, 3 if it is gated, else 2. So many hidden vectors are counted too
    embeddings      2, or 1 if the head is tied
    weight_bytes, act_bytes, kv_bytes  bytes of a weight, of an activation and of a value of K or V
    """

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
        """W_mha: bytes of a layer's attention."""
        kv = self.attention * self.kv_heads / self.heads
        return self.weight_bytes * self.d * (2 * self.attention + 2 * kv + 1)

    @property
    def mlp_bytes(self) -> float:
        """W_mlp: bytes of a layer's FFN."""
        return self.weight_bytes * self.d * (self.matrices * self.hidden + 1)

    @property
    def embed_bytes(self) -> float:
        """W_embed: bytes of the embedding, or of the head."""
        return self.weight_bytes * self.d * self.vocab

    @property
    def weights_bytes(self) -> float:
        """W: bytes of all weights."""
        return self.embeddings * self.embed_bytes + self.layers * (self.mha_bytes + self.mlp_bytes)

    def kv_total_bytes(self, batch: int, tokens: int) -> float:
        """C = 2·p·b·s·l·d·h_kv/h: bytes of all KV."""
        return 2 * self.kv_bytes * batch * tokens * self.layers * self.attention * self.kv_heads / self.heads


@dataclass(frozen=True)
class Peaks:
    """Bytes of device memory while attention, an FFN and the head compute: M_mha, M_mlp and M_embed."""

    mha: float
    mlp: float
    embed: float

    @property
    def peak(self) -> float:
        """M: the most bytes of device memory."""
        return max(self.mha, self.mlp, self.embed)


@dataclass(frozen=True)
class MachineLimits:
    """What a machine has: M_GPU and M_CPU in bytes, and the speeds of the link and of the disk."""

    device_bytes: float
    host_bytes: float
    link_bytes_per_s: float
    disk_bytes_per_s: float

    @property
    def link_is_faster(self) -> bool:
        """Whether the link is faster than the disk. If not, weights in RAM are no nearer than weights on the disk."""
        return self.link_bytes_per_s > self.disk_bytes_per_s


@dataclass(frozen=True)
class Configuration:
    """A configuration. `on_device`: the share of the weights that is at home on the device; `home`: the home of the
    rest; `pipeline`: one of PIPELINES."""

    home: Tier
    pipeline: str
    on_device: float = 0.0


def sizes(spec: ModelSpec, weights: Format, kv: Format) -> Sizes:
    """The sizes of a model, of which all layers are taken to be like the first. Activations are in half precision
    (section 4.1), or in float32 if the model is. Integer weights count with their scales and minimums."""
    a, f = spec.layers[0].attention, spec.layers[0].ffns[0]
    scales = 32 / weights.group if weights.group else 0.0
    return Sizes(
        layers=len(spec.layers), d=spec.d_model, attention=a.heads * a.head_dim, hidden=f.neurons,
        matrices=3 if f.gated else 2, heads=a.heads, kv_heads=a.kv_heads, vocab=spec.vocab,
        embeddings=1 if spec.tied else 2, weight_bytes=(weights.bits + scales) / 8,
        act_bytes=4 if spec.dtype == "float32" else 2, kv_bytes=kv.kv_bytes(a.head_dim) / a.head_dim,
    )  # fmt: skip


def peaks(s: Sizes, batch: int, tokens: int, stage: str, preloading: bool) -> Peaks:
    """The peaks of appendix B.1 (`stage` "prefill") and B.2 ("decode"). `preloading`: the next block comes while one
    computes."""
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
    """M of a pipeline in bytes. It is that of prefill, which needs the most."""
    return peaks(s, batch, tokens, "prefill", pipeline == "overlapped").peak


def equation_1(s: Sizes, batch: int, tokens: int, limits: MachineLimits) -> Configuration:
    """The configuration that Eq. 1 chooses, exactly as published. If neither memory has room, it is the disk, whose
    size the equation does not ask for."""
    need, kv = peak_bytes(s, batch, tokens, "overlapped"), s.kv_total_bytes(batch, tokens)
    if s.weights_bytes + need < limits.device_bytes:
        home: Tier = GPU.executor
    elif s.weights_bytes + kv < limits.host_bytes and limits.link_is_faster:
        home = HOST
    else:
        home = DISK.tier
    return Configuration(home, "overlapped" if need < limits.device_bytes else "saving", float(home == GPU.executor))
