"""Defines every op: its operands by name, its settings, and the blocks of a granule that it multiplies with.

Letters in shapes: T rows of the batch, D d_model, H heads, K KV heads, E head_dim, N neurons, P page_tokens, V vocab,
n rows whose logits are wanted, X experts, A experts that a token goes to.

    tokens                  int32 [T]
    rows                    float32 [T, d_embed]
    x, h, partial, pending  float32 [T, D]; the head's h is [n, max(D, d_embed)]
    q, a                    float32 [T, H, E]
    keys, values            [pages, K, P, E] in the KV format, laid out as spec/format.py says
    active                  uint8 [T, N], with N in whole granules
    logits                  float32 [n, V]
    routes                  int32 [T, A], the experts of each row in rising order, then float32 [T, A], the factors of
                            their outputs, then float32 [T], the factor of the shared expert's output
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.graph.ops.operand import (
    BYTES,
    EXPONENTIALS,
    SUMS,
    Added,
    Afters,
    Read,
    Reads,
    Scratch,
    Write,
    Writes,
)  # fmt: skip

# The blocks of a granule that an op multiplies with or adds. The op's cost is counted over them.
QKV_BLOCKS = ("q", "k", "v", "q_bias", "k_bias", "v_bias")
OUT_BLOCKS = ("o",)
FFN_BLOCKS = ("gate", "up", "down", "gate_bias", "up_bias")
PREDICTOR_BLOCKS = ("hidden", "neurons", "hidden_bias", "neurons_bias")
ROUTER_BLOCKS = ("scores", "bias", "shared_gate")
VOCAB_BLOCKS = ("rows",)
# Ops that multiply all rows by a unit's matrices → the blocks that they multiply with or add.
PRODUCTS: Mapping[str, tuple[str, ...]] = {
    "qkv": QKV_BLOCKS,
    "out": OUT_BLOCKS,
    "ffn": FFN_BLOCKS,
    "head": VOCAB_BLOCKS,
}

# -- the model's ends -------------------------------------------------------------------------------


class Gather(NamedTuple):
    """rows = the embedding rows of the batch's tokens, from weights in memory."""

    weights: Read
    tokens: Read
    rows: Write


class Fetch(NamedTuple):
    """rows = the embedding rows of the batch's tokens, read from the disk. `staging` holds the granules that are on
    their way at once."""

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
    """logits = h · rows, for the vocabulary rows of the unit. `best` [n]: the most likely token of each row so far, its
    float32 logit and its int32 id. `starts`: this is the first unit, so `best` holds nothing yet."""

    weights: Read
    h: Read
    logits: Write
    best: Added
    scratch: Scratch
    starts: bool


# -- a layer's blocks -------------------------------------------------------------------------------


class Norm(NamedTuple):
    """h = norm(x), or h = x where the model has no such norm. `which`: attn_in, ffn_in or final. The final norm has no
    layer (None), and takes only the rows whose logits are wanted, or `every` row where hidden states are."""

    norms: Read
    x: Read
    h: Write
    scratch: Scratch
    which: str
    layer: int | None
    every: bool = False


class Order(NamedTuple):
    """rows float32 [T, C]: column i becomes what column order[i] was. `which` order of `norms`: attn, o or ffn. Numbers
    that are no column of `rows` count as 0."""

    norms: Read
    rows: Added
    scratch: Scratch
    which: str
    layer: int


class Qkv(NamedTuple):
    """q, k and v of the unit's KV heads, with bias, q/k norm and rope. k and v are written into the KV cache, or with
    `fresh` apart from it (`graph.fresh`)."""

    weights: Read
    norms: Read
    h: Read
    q: Write
    keys: Write
    values: Write
    scratch: Scratch
    layer: int
    fresh: bool = False


class Attend(NamedTuple):
    """a = softmax(q · keys) · values of the unit's KV heads. `norms` (one slot, or none): the layer's, which hold a
    sink for each head. `fresh`: keys and values are those of the batch's rows alone, apart from the cache.
    `value_share`: below 1, the softmax is over a query's best positions alone (`Plan.value_share`). Of equal scores
    the earlier positions are taken.

    If the cache has integers, and activations need not be exact, native kernels round what multiplies the codes. The
    numbers of a query are rounded in groups of up to 256 columns, in steps of the group's largest number divided by 127
    if keys are int4, and by 32,767 if they are int8. The products of a position's weight and its scale are rounded in
    groups of 64 positions, in steps of the largest divided by 32,767. The part that is rounded away is multiplied with
    the middle code. The tolerance holds for exact activations."""

    q: Read
    keys: Read
    values: Read
    a: Write
    scratch: Scratch
    layer: int
    norms: Reads = ()
    fresh: bool = False
    value_share: float = 1.0


class Append(NamedTuple):
    """Puts keys and values of the batch's rows, which lie row after row apart from the cache, at their places in it."""

    fresh_keys: Read
    fresh_values: Read
    keys: Write
    values: Write
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
    """partial (+)= FFN over the unit's neurons. SUM_NEURONS neurons are added up at a time, counted from the layer's
    first: a four of granules, or fewer granules if these are wide.

    `starts_sum`: this call is the first addend. `continues_four`: the unit before left the sum of a four of granules
    unfinished, in `pending`. `leaves_four`: this unit leaves one unfinished. With `active` (one slot, or none) neurons
    that are not active count as if their activation was 0. Activations whose magnitude is below `level` count as 0 too.
    `skips`: what an activation of 0 multiplies may be left out. With `values` (one slot, or none) the unit is asked
    for, and `values` holds its activations. `weights` of a unit that is asked for, by activations or by predictors, are
    its pages with records (`graph.asked`). `row_flops`: of the call's flops, those of neurons' rows one by one, and not
    of tiles."""

    weights: Read
    h: Read
    partial: Added
    pending: Added
    scratch: Scratch
    layer: int
    starts_sum: bool
    continues_four: bool
    leaves_four: bool
    skips: bool = False
    active: Reads = ()
    level: float = 0.0
    values: Reads = ()
    row_flops: int = 0


class Fire(NamedTuple):
    """values float32 [granules, T, 64] = act(gate h), or act(up h), of the unit's neurons. A neuron whose value is not
    0 fires. `weights`: the part of the unit that stays in RAM (`graph.asked`)."""

    weights: Read
    h: Read
    values: Write
    scratch: Scratch
    layer: int


class Route(NamedTuple):
    """routes = the experts that each row goes to, by the router's scores of h, and the factors of their outputs.

    `guesses`: 0, or h is not the layer's own but that of the layer before. Then the answer is a guess,
    and for each row at most so many of its experts are loaded, those with the largest factors first."""

    weights: Read
    h: Read
    routes: Write
    scratch: Scratch
    layer: int
    guesses: int = 0


class Experts(NamedTuple):
    """partial (+)= Σ factor · FFN of the expert, over some experts. A row's experts are always added in rising order,
    so calls that add to `partial` come by rising experts. With `outputs` (one slot, or none: float32 [T, A, D]) each
    FFN's output is kept there instead, in any order, until `Combine`.

    `weights`: slots that hold whole experts. `first_experts`: the first expert of each slot. `starts_sum`: this call is
    the first addend. `expert_rows`: about so many rows go to an expert that has any."""

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
    """partial (+)= Σ factor · outputs, experts in rising order. `starts_sum`: this call is the first addend."""

    routes: Read
    outputs: Read
    partial: Added
    layer: int
    starts_sum: bool


class Gate(NamedTuple):
    """partial = partial times the shared expert's factor in `routes`. `partial` holds the shared expert's output."""

    routes: Read
    partial: Added
    layer: int


class Predict(NamedTuple):
    """active = whether a row needs a neuron of the layer's FFN: neurons · relu(hidden · h + hidden_bias) + neurons_bias
    is above 0 (PowerInfer §5.1)."""

    weights: Read
    h: Read
    active: Write
    scratch: Scratch
    layer: int


class Merge(NamedTuple):
    """x += norm_out(sum of partials + bias), then norm_after. `block`: attn or ffn. With `routes` (one slot, or none)
    the bias of a row is Σ factor · that of each of its experts, in rising order."""

    norms: Read
    x: Added
    partials: Reads
    scratch: Scratch
    layer: int
    block: str
    routes: Reads = ()


# -- bytes from one tier to another -----------------------------------------------------------------


class Copy(NamedTuple):
    """Activations, tokens or logits across the link, on the device's own lane. `what`: the name of the buffer."""

    source: Read
    target: Write
    what: str


class Load(NamedTuple):
    """Loads granules lo..hi of a unit's part from its disk into a ring or a cache. `asked`: for a load into a cache,
    the slots of `routes` that ask for it. The load comes after them, since it is not known before they are written."""

    target: Write
    lo: int
    hi: int
    asked: Afters = ()


class Pick(NamedTuple):
    """Loads the records of a unit's neurons that fire, or are active, from its disk to their places among the unit's
    pages with records. `runs`: bytes lo..hi of the part, in rising order (`graph.asked`). `asked`: the slots of
    `values`, or of `active`, that ask for them. The load comes after them. `follows`: the disk still has other
    reads when it begins, of this layer, or of the layer before if it was asked for a layer ahead."""

    target: Write
    runs: tuple[tuple[int, int], ...]
    asked: Afters
    follows: bool = False


class Recall(NamedTuple):
    """Brings records of a unit that is asked for from slots to their places among the unit's pages with records, and
    then records that were read into slots. `held`, `kept`: neuron and slot of each, as uint32 (`graph.recent`). Either
    operand is written in parts."""

    picked: Write
    slots: Write
    held: bytes
    kept: bytes


class Lift(NamedTuple):
    """Copies a unit from RAM into a device's ring, or an expert into a device's cache. `expert`: its number, -1 for a
    unit. `asked`: as of `Load`."""

    source: Read
    target: Write
    expert: int = -1
    asked: Afters = ()


class KvLoad(NamedTuple):
    """Loads KV that lives elsewhere into a window: the pages before a batch's rows. `ranges`: how many byte ranges they
    are."""

    stored_keys: Read
    stored_values: Read
    keys: Write
    values: Write
    layer: int
    ranges: int


class KvSave(NamedTuple):
    """Saves a batch's rows, and what lies between them in their pages, to their home. `ranges`: how many byte ranges
    they are. `fresh`: keys and values are pages apart from the cache, which are saved whole."""

    keys: Read
    values: Read
    stored_keys: Write
    stored_values: Write
    layer: int
    ranges: int
    fresh: bool = False


class Sync(NamedTuple):
    """Does nothing, but makes edges: it waits for all loads before it, and all loads after it wait for it."""

    loaded: Writes


# How far an implementation may be from the reference, as a share of the largest number in a row.
TOLERANCES: dict[type[Any], float] = {
    Gather: 1e-6, Fetch: 1e-6, Embed: SUMS, Norm: SUMS, Qkv: EXPONENTIALS, Attend: EXPONENTIALS, Out: SUMS,
    Ffn: EXPONENTIALS, Fire: EXPONENTIALS, Route: EXPONENTIALS, Experts: EXPONENTIALS, Combine: SUMS, Gate: SUMS,
    Predict: SUMS, Merge: SUMS, Head: SUMS, Order: BYTES, Append: BYTES,
    Copy: BYTES, Load: BYTES, Pick: BYTES, Recall: BYTES, Lift: BYTES, KvLoad: BYTES, KvSave: BYTES, Sync: BYTES,
}  # fmt: skip
