"""Every op: its operands by name, what else it needs, and the blocks of a granule that it multiplies with.

Shapes: T rows of the batch, D d_model, H heads, K KV heads, E head_dim, N neurons, P page_tokens, V vocab, n rows whose
logits are wanted. tokens int32 [T]; rows float32 [T, d_embed]; x, h, partial, pending float32 [T, D] (h of the head
[n, max(D, d_embed)]); q, a float32 [T, H, E]; keys, values [pages, K, P, E] in the KV format, laid out as
spec/format.py says; active uint8 [T, N]; logits float32 [n, V]. X experts, A of a token; routes: int32 [T, A], the
experts of each row upwards; float32 [T, A], what multiplies their outputs; float32 [T], what multiplies the shared
expert's.
"""

from typing import Any, NamedTuple

from penstock.graph.ops.operand import (
    BYTES,
    EXPONENTIALS,
    SUMS,
    Added,
    Read,
    Reads,
    Scratch,
    Write,
    Writes,
)  # fmt: skip

# The blocks of a granule that an op multiplies with or adds: they are its cost.
QKV_BLOCKS = ("q", "k", "v", "q_bias", "k_bias", "v_bias")
OUT_BLOCKS = ("o",)
FFN_BLOCKS = ("gate", "up", "down", "gate_bias", "up_bias")
PREDICTOR_BLOCKS = ("hidden", "neurons")
ROUTER_BLOCKS = ("scores", "bias", "shared_gate")
VOCAB_BLOCKS = ("rows",)

# -- the model's ends -------------------------------------------------------------------------------


class Gather(NamedTuple):
    """rows = the embedding rows of the batch's tokens, out of resident weights."""

    weights: Read
    tokens: Read
    rows: Write


class Fetch(NamedTuple):
    """rows = the embedding rows of the batch's tokens, out of the disk. `staging` holds one granule."""

    tokens: Read
    rows: Write
    staging: Write


class Embed(NamedTuple):
    """x = rows · embed_scale (projected, plus learned positions). `edges`: the weights of the model's ends."""

    rows: Read
    edges: Read
    x: Write
    scratch: Scratch


class Head(NamedTuple):
    """logits of the unit's tokens. `best` [n]: the most likely token of each row so far, float32 logit and int32 id.
    `starts`: there is none so far."""

    weights: Read
    h: Read
    logits: Write
    best: Added
    scratch: Scratch
    starts: bool


# -- a layer's blocks -------------------------------------------------------------------------------


class Norm(NamedTuple):
    """h = norm(x), or x where the model has no such norm. `which`: attn_in, ffn_in or final. The final norm has no
    layer (None), and takes only the rows whose logits are wanted."""

    norms: Read
    x: Read
    h: Write
    scratch: Scratch
    which: str
    layer: int | None


class Qkv(NamedTuple):
    """q, k and v of the unit's KV heads, with bias, q/k norm and rope; k and v go into the cache."""

    weights: Read
    norms: Read
    h: Read
    q: Write
    keys: Write
    values: Write
    scratch: Scratch
    layer: int


class Attend(NamedTuple):
    """a = softmax(q · keys) · values of the unit's KV heads."""

    q: Read
    keys: Read
    values: Read
    a: Write
    scratch: Scratch
    layer: int


class Out(NamedTuple):
    """partial (+)= a · o over the unit's heads. `starts_sum`: this call is the first addend."""

    weights: Read
    a: Read
    partial: Added
    scratch: Scratch
    layer: int
    starts_sum: bool


class Ffn(NamedTuple):
    """partial (+)= FFN over the unit's neurons, SUM_GRANULES of its layer's granules at a time: a four.

    `starts_sum`: this call is the first addend. `continues_four`: the unit before left the sum of a four of granules
    unfinished, in `pending`. `leaves_four`: this unit does. With `active` (one slot, or none) only the neurons that are
    active are computed."""

    weights: Read
    h: Read
    partial: Added
    pending: Added
    scratch: Scratch
    layer: int
    starts_sum: bool
    continues_four: bool
    leaves_four: bool
    active: Reads = ()


class Route(NamedTuple):
    """routes = which experts each row goes to, by the router's scores of h, and what multiplies their outputs."""

    weights: Read
    h: Read
    routes: Write
    scratch: Scratch
    layer: int


class Experts(NamedTuple):
    """partial (+)= Σ routes' weight · FFN of the expert, over some experts. A row's sum has one order, upwards: so
    calls that add to `partial` come by rising experts. With `outputs` (one slot, or none: float32 [T, A, D]) each FFN
    is kept there instead, in any order, until `Combine`.

    `first_experts`: of each slot of weights, which hold whole experts. `starts_sum`: this call is the first addend.
    `expert_rows`: about so many rows go to an expert that has any."""

    weights: Reads
    h: Read
    routes: Read
    partial: Added
    outputs: Writes
    scratch: Scratch
    layer: int
    first_experts: tuple[int, ...]
    starts_sum: bool
    expert_rows: int


class Combine(NamedTuple):
    """partial (+)= Σ routes' weight · outputs, experts upwards. `starts_sum`: this is the first addend."""

    routes: Read
    outputs: Read
    partial: Added
    layer: int
    starts_sum: bool


class Gate(NamedTuple):
    """partial, which holds what the shared expert gave, times its weight of `routes`."""

    routes: Read
    partial: Added
    layer: int


class Predict(NamedTuple):
    """active = whether a row needs a neuron of the layer's FFN. Only planned so far: no kernel does it."""

    weights: Read
    h: Read
    active: Write
    scratch: Scratch
    layer: int


class Merge(NamedTuple):
    """x += norm_out(sum of partials + bias), then norm_after. `block`: attn or ffn."""

    norms: Read
    x: Added
    partials: Reads
    scratch: Scratch
    layer: int
    block: str


# -- bytes from one tier to another -----------------------------------------------------------------


class Copy(NamedTuple):
    """Activations, tokens or logits across the link, on the device's own lane. `what`: the name of the buffer."""

    source: Read
    target: Write
    what: str


class Load(NamedTuple):
    """Granules lo..hi of a unit's part from its disk into a ring or a cache. `asked`: where stands what asked for them,
    since nobody knows of them before that is written."""

    target: Write
    lo: int
    hi: int
    asked: Reads = ()


class Lift(NamedTuple):
    """A unit from memory into a device's ring."""

    source: Read
    target: Write


class KvLoad(NamedTuple):
    """Loads KV that lives elsewhere into a window: the pages before a batch's rows, in so many byte `ranges`."""

    stored_keys: Read
    stored_values: Read
    keys: Write
    values: Write
    layer: int
    ranges: int


class KvSave(NamedTuple):
    """The pages with a batch's rows to where they live, in so many byte `ranges`."""

    keys: Read
    values: Read
    stored_keys: Write
    stored_values: Write
    layer: int
    ranges: int


class Sync(NamedTuple):
    """Nothing but an edge: what was loaded is there, and no load to come has begun."""

    loaded: Writes


# How far an implementation may be from the reference, of the largest number in a row.
TOLERANCES: dict[type[Any], float] = {
    Gather: 1e-6, Fetch: 1e-6, Embed: SUMS, Norm: SUMS, Qkv: EXPONENTIALS, Attend: EXPONENTIALS, Out: SUMS,
    Ffn: EXPONENTIALS, Route: EXPONENTIALS, Experts: EXPONENTIALS, Combine: SUMS, Gate: SUMS, Predict: SUMS,
    Merge: SUMS, Head: SUMS,
    Copy: BYTES, Load: BYTES, Lift: BYTES, KvLoad: BYTES, KvSave: BYTES, Sync: BYTES,
}  # fmt: skip
