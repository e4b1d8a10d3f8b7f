"""A model's architecture as data: the content of `config.json`, in one vocabulary for all model types.

ModelSpec holds no weights and no formats. `spec.parts` turns it and a format into parts and bytes. Letters used in
shapes: T rows (tokens), D d_model, V vocab, H heads, K kv_heads, G = H / K, E head_dim, N neurons, X experts, A experts
that a token goes to.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from penstock.errors import BadRequest

RELUS = ("relu", "relu2")  # activations that give zeros
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2", "swiglu_clamped")
SWIGLU_LIMIT = 7.0  # of `swiglu_clamped`; kernels in C++ and Triton have it too
SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions over the first `dims` of each head.

    `factors` holds all scalars of the kind, by name. Where a config leaves them to a rule they are worked out already:

    default   none
    linear    factor
    llama3    factor, low_freq_factor, high_freq_factor, original_max_position_embeddings
    yarn      factor, attention_factor, beta_fast, beta_slow, truncate (0 or 1), original_max_position_embeddings
    longrope  attention_factor, original_max_position_embeddings. Its divisors of the frequencies stand in
              `short_factor` and `long_factor` (dims / 2 each). `long_factor` is used from the first sequence on that
              is longer than original_max_position_embeddings

    `attention_factor` multiplies cos and sin.
    """

    theta: float
    dims: int
    kind: str = "default"
    factors: tuple[tuple[str, float], ...] = ()
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class NormSpec:
    """`kind`: "rms" or "layer". `offset` is added to the weight, since gemma stores weight - 1. `affine`: there is a
    weight (and for "layer" a bias)."""

    kind: str
    eps: float
    offset: float = 0.0
    affine: bool = True

    @property
    def has_bias(self) -> bool:
        return self.kind == "layer" and self.affine


@dataclass(frozen=True, slots=True)
class Attention:
    """`scale` multiplies the scores. `softcap` s squashes them to s·tanh(score/s), 0 = none. `window`: a query sees so
    many last positions, its own included, 0 = all. `qk_norm`: each head's q, and each head's k, goes through an RMS
    norm. With `norms_all_heads` (olmoe) one norm is over all heads' q together, and one over all heads' k. `sinks`
    (gpt-oss): each head has a learned score that its softmax counts beside those of the positions."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float = 0.0
    window: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    rope: Rope | None = None
    norms_all_heads: bool = False
    sinks: bool = False

    @property
    def heads_per_kv(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class FfnSpec:
    """A feed-forward block: down(act(gate x) * (up x)) where `gated`, else down(act(up x)).

    With `swiglu_clamped` (gpt-oss) a gate g above 7 counts as 7, an up u beyond ± 7 as ± 7, and the block is
    down(g · sigmoid(1.702 g) * (u + 1)).

    Raises BadRequest for an unknown activation, and for `swiglu_clamped` without a gate."""

    neurons: int
    activation: str
    gated: bool
    up_bias: bool = False
    down_bias: bool = False

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise BadRequest(f"unknown activation {self.activation!r}")
        if self.activation == "swiglu_clamped" and not self.gated:
            raise BadRequest("swiglu_clamped without a gate")


@dataclass(frozen=True, slots=True)
class Router:
    """How a token's experts are chosen: those with the highest scores. Of equal scores the lowest id wins.

    `score`: an expert's score is "softmax" over the router's X outputs, or "sigmoid" of its own output. `bias`: the
    router has a number for each expert, which is added to its score for the choice only, or with `bias_scored` to its
    output before the score is worked out (gpt-oss). `groups`: experts are cut into so many ranges, of which only
    `groups_kept` may be chosen from: those with the largest sums of their two best scores. `normalised`: the chosen
    scores are divided by their sum. `scale` multiplies them in the end.

    Raises BadRequest for `bias_scored` without a bias.
    """

    score: str
    normalised: bool
    bias: bool = False
    groups: int = 1
    groups_kept: int = 1
    scale: float = 1.0
    bias_scored: bool = False

    def __post_init__(self) -> None:
        if self.bias_scored and not self.bias:
            raise BadRequest("a router's bias is part of its scores, but it has none")


@dataclass(frozen=True, slots=True)
class Routed:
    """An FFN of `experts`, of which each token goes to `active`. Its output is the sum of their outputs, each times its
    score.

    `expert`: the shape of each expert. `shared`: an FFN that every token goes to as well. With `shared_gate` its output
    is multiplied by the sigmoid of one more output of the router.

    Raises BadRequest for numbers that make no sense.
    """

    experts: int
    active: int
    expert: FfnSpec
    router: Router
    shared: FfnSpec | None = None
    shared_gate: bool = False

    def __post_init__(self) -> None:
        router = self.router
        if not 1 <= self.active <= self.experts:
            raise BadRequest(f"a token goes to {self.active} experts, of which there are {self.experts}")
        if router.score not in SCORES:
            raise BadRequest(f"unknown score {router.score!r}")
        if not 1 <= router.groups_kept <= router.groups or self.experts % router.groups:
            raise BadRequest(
                f"{router.groups_kept} of {router.groups} groups of {self.experts} experts cannot be chosen"
            )
        eligible = self.experts // router.groups * router.groups_kept
        if self.active > eligible:
            raise BadRequest(f"a token goes to {self.active} experts, but the groups that are kept have {eligible}")
        if router.groups > 1 and self.experts // router.groups < 2:
            raise BadRequest(f"{router.groups} groups of {self.experts} experts: each should have two")
        if self.shared_gate and self.shared is None:
            raise BadRequest("there is a gate of a shared expert, but no shared expert")

    def routes_bytes(self, rows: int) -> int:
        """Bytes of a router's answer for so many rows. Each row has A ids int32, A factors float32, and the shared
        expert's factor float32."""
        return 4 * rows * (2 * self.active + 1)


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. Its norms stand at the same places for attention and FFN:

    norm_in     the block reads norm(x)
    norm_out    norm(block output) is added to x (gemma2)
    norm_after  x becomes norm(x + block output) (OPT-350m)

    `parallel_norms`: 0 where the FFN reads what attention made of x. Otherwise both read x as it was before (falcon),
    through one norm or through one each: then it is 1 or 2. `ordered`: the columns of the matrices that read h, and of
    o, lie in an order of the layer's own (GPTQ's act-order), into which their inputs are brought.
    """

    attention: Attention
    ffn: FfnSpec | Routed
    norm_in: bool = True
    norm_out: bool = False
    norm_after: bool = False
    parallel_norms: int = 0
    ordered: bool = False

    @property
    def routed(self) -> Routed | None:
        """The layer's experts; None where its FFN is dense."""
        return self.ffn if isinstance(self.ffn, Routed) else None

    @property
    def active(self) -> int:
        """Experts that a token goes to; 0 where the FFN is dense."""
        return self.ffn.active if isinstance(self.ffn, Routed) else 0

    @property
    def ffns(self) -> tuple[FfnSpec, ...]:
        """The dense FFN; or the FFN of an expert, and the shared FFN if there is one."""
        if isinstance(self.ffn, FfnSpec):
            return (self.ffn,)
        return (self.ffn.expert,) if self.ffn.shared is None else (self.ffn.expert, self.ffn.shared)


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer.

    `d_embed` differs from `d_model` only where the embedding is projected (OPT-350m). `tied`: the head's weights are
    the embedding's. `embed_scale` multiplies the embedding rows. `position_rows` > 0 means learned positions, read at
    index position + `position_offset`. `logit_softcap` s squashes logits to s·tanh(logit/s), 0 = none. `dtype` is the
    checkpoint's own number format. `tokenizer_bytes`: memory that the tokenizer adds to the process at its peak.
    `cannot_run`: what this version lacks to run the model, in a few words; empty where it runs. Such a spec serves
    planning alone.

    Raises BadRequest for sizes that make no sense.
    """

    model_type: str
    dtype: str
    vocab: int
    d_model: int
    d_embed: int
    max_positions: int
    layers: tuple[Layer, ...]
    norm: NormSpec
    final_norm: bool
    tied: bool
    embed_scale: float = 1.0
    position_rows: int = 0
    position_offset: int = 0
    logit_softcap: float = 0.0
    tokenizer_bytes: int = 0
    cannot_run: str = ""

    @property
    def is_routed(self) -> bool:
        """Whether any of its layers has experts."""
        return any(layer.routed is not None for layer in self.layers)

    @property
    def fires(self) -> bool:
        """Whether neurons of its FFNs fire or not: their activation is a ReLU, which gives zeros."""
        return all(isinstance(layer.ffn, FfnSpec) and layer.ffn.activation in RELUS for layer in self.layers)

    @property
    def has_levels(self) -> bool:
        """Whether small activations of its FFNs may be taken for zeros: they are dense, and none has a ReLU. No dense
        model has `swiglu_clamped`, and no kernel of neurons knows it."""
        others = (*RELUS, "swiglu_clamped")
        return all(isinstance(layer.ffn, FfnSpec) and layer.ffn.activation not in others for layer in self.layers)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once: for 80 layers it takes 35 µs, and a planner asks for a model's parts thousands of times."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __post_init__(self) -> None:
        for name in ("vocab", "d_model", "d_embed", "max_positions"):
            value = getattr(self, name)
            if not 0 < value < 2**31:
                raise BadRequest(f"{name} is {value}")
        if not self.layers:
            raise BadRequest("the model has no layers")
        for i, layer in enumerate(self.layers):
            a, neurons = layer.attention, min(ffn.neurons for ffn in layer.ffns)
            if min(a.heads, a.kv_heads, a.head_dim, neurons) < 1 or a.heads % a.kv_heads:
                raise BadRequest(
                    f"layer {i}: {a.heads} heads, {a.kv_heads} KV heads of {a.head_dim}, {neurons} neurons"
                )
