"""Parts and granules: how a model's weights are cut into pieces that can be placed and computed one by one, to the
byte.

A part is `granules` granules of one fixed stride. A granule holds whole matrices ("blocks"), so any range
of granules can be computed by itself and partial results add up. Matrices that are multiplied lie in tiles of 16
rows; vectors and learned positions lie row by row (`spec.format`):

    N.attn      a granule is one KV head:       q [G*E, D] | k [E, D] | v [E, D] | o [D, G*E] | biases
                (where all heads are normed together, or o has an order, a granule is all of them)
    N.ffn       a granule is 64 neurons (*):    gate [64, D] | up [64, D] | down [D, 64] | biases
                or, of ReLU models, where weights are packed neuron by neuron:
                                                gate [64, D] | 64 records: up [D] | down [D] | biases
                                                without a gate: up [64, D] | 64 records: down [D] | biases
                or with all of a neuron's weights in its record:
                                                64 records: gate [D] | up [D] | down [D] | biases
    N.experts   the same, expert after expert:  an expert is a range of whole granules with a tail of its own
    N.shared    the same, for the FFN that all tokens go to beside their experts
    N.router    one granule, float:             scores [X, D] | bias [X] | shared_gate [1, D]
    embed, head   64 vocabulary rows:           rows [64, d_embed]
    N.predictor one granule:                    hidden [R, D] | neurons [N, R] | hidden_bias | neurons_bias
    N.norms     one granule, float:             norm weights, biases that are added once per layer or expert, sinks,
                                                orders: the column of the input that each column of a matrix multiplies
    edges       one granule, float:             the model's ends: final norm, learned positions, projections

(*) 128 or 256 where `down`, whose rows are cut by granules, takes fewer bytes so: its format has a scale for more than
64 columns, or headers for 256 (`ffn_width`).

The stride is a multiple of 4096 bytes, so every range of granules is one aligned direct read. A last granule with fewer
rows (172 neurons: 64 + 64 + 44) is padded with zeros. The activation of 0 is 0, so padding adds nothing to a result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from penstock.errors import BadRequest
from penstock.spec.format import FLOAT32, Format, Kinds, Share
from penstock.spec.model import RELUS, FfnSpec, Layer, ModelSpec, Routed
from penstock.units import round_up

GRANULE_ROWS = 64
WIDE_ROWS = (GRANULE_ROWS, 128, 256)  # neurons that a granule may have
SUM_NEURONS = 256  # neurons of an FFN that are summed before they are added to the rest (csrc/shapes.h, FfnSum)
# Kinds of parts that always stay where activations are: every step reads them, and they are under 1 % of a model.
PINNED = ("norms", "router", "edges")
FFNS = ("ffn", "shared", "experts")  # kinds of parts that are neurons
MIXED = ("attn", *FFNS, "embed", "head")  # kinds of parts whose matrices have the formats of the model's weights
PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Block:
    """One matrix inside a granule: [rows, cols] at byte `offset` of the granule, in `format`. It is tiled, or lies row
    by row. `stride`: bytes from a neuron's row to the next one's, between which other blocks' rows may lie; 0 for what
    does not lie neuron by neuron. `nbytes`: without such gaps."""

    name: str
    rows: int
    cols: int
    format: Format
    offset: int
    tiled: bool = True
    stride: int = 0
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        if self.stride:
            nbytes = self.rows * self.format.row_bytes(self.cols)
        else:
            size = self.format.matrix_bytes if self.tiled else self.format.plain_bytes
            nbytes = size(self.rows, self.cols)
        object.__setattr__(self, "nbytes", nbytes)

    @property
    def end(self) -> int:
        """The byte of the granule after its last one."""
        if not self.stride:
            return self.offset + self.nbytes
        return self.offset + (self.rows - 1) * self.stride + self.format.row_bytes(self.cols)


@dataclass(frozen=True, slots=True)
class Part:
    """A kind of weights of one layer, or of the model's ends. `key`: "7.ffn". `kind`: attn, ffn, experts, shared,
    router, norms, embed, head or edges. `layer`: -1 outside layers.

    `rows`: the neurons, KV heads or vocabulary rows that granules cut, of one expert where there are experts.
    `granule_rows`: how many of them a granule has. `experts`: their number, 1 for other parts.
    """

    key: str
    kind: str
    layer: int
    rows: int
    granule_rows: int
    granule_bytes: int
    blocks: tuple[Block, ...]
    experts: int = 1
    # The kind of format that all of its matrices have, "" where they have several. Asked for with every lowered call.
    _kind: str = field(init=False, repr=False, compare=False)
    # Names of blocks → `kinds` of them. Of a mixture of formats, counting their shares was a tenth of planning.
    _kinds_of: dict[tuple[str, ...], Kinds] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        kinds = {b.format.kind for b in self.blocks if b.tiled or b.stride} or {b.format.kind for b in self.blocks[:1]}
        object.__setattr__(self, "_kind", kinds.pop() if len(kinds) == 1 else "")

    @property
    def sum_granules(self) -> int:
        """Of an FFN: how many granules are summed before they are added to the rest."""
        return SUM_NEURONS // self.granule_rows

    @property
    def expert_granules(self) -> int:
        """Granules of one expert. Where there are no experts, granules of the part."""
        return -(-self.rows // self.granule_rows)

    @property
    def granules(self) -> int:
        return self.experts * self.expert_granules

    @property
    def least_granules(self) -> int:
        """Granules of the smallest unit: one, or those of one expert. Every unit holds a multiple of it."""
        return self.expert_granules if self.experts > 1 else 1

    @property
    def least_bytes(self) -> int:
        return self.least_granules * self.granule_bytes

    @property
    def nbytes(self) -> int:
        return self.granules * self.granule_bytes

    def rows_of(self, lo: int, hi: int) -> int:
        """Rows in granules lo..hi, without padding."""
        return self._rows_before(hi) - self._rows_before(lo)

    def _rows_before(self, granule: int) -> int:
        if self.experts == 1:
            return min(granule * self.granule_rows, self.rows)
        expert, nth = divmod(granule, self.expert_granules)
        return expert * self.rows + nth * self.granule_rows

    def weights_of(self, lo: int, hi: int) -> int:
        """Weights (multiply-adds per token) in granules lo..hi, without padding."""
        per_row = sum(b.rows * b.cols for b in self.blocks) / self.granule_rows
        return int(per_row * self.rows_of(lo, hi))

    def block(self, name: str) -> Block:
        return next(b for b in self.blocks if b.name == name)

    def has(self, name: str) -> bool:
        return any(b.name == name for b in self.blocks)

    def kinds(self, names: tuple[str, ...] = ()) -> Kinds:
        """The formats of these blocks, without names those of all its matrices: what rates are looked up by."""
        if not self._kind and names not in self._kinds_of:
            self._kinds_of[names] = self._shares(names)
        return self._kind or self._kinds_of[names]

    def _shares(self, names: tuple[str, ...]) -> Kinds:
        matrices = [b for b in self.blocks if b.tiled or b.stride]
        chosen = [b for b in matrices if not names or b.name in names] or self.blocks[:1]
        kind = chosen[0].format.kind
        if all(b.format.kind == kind for b in chosen):
            return kind
        nbytes, weights = sum(b.nbytes for b in chosen), sum(b.rows * b.cols for b in chosen)
        of_kind = {
            kind: [b for b in chosen if b.format.kind == kind] for kind in dict.fromkeys(b.format.kind for b in chosen)
        }
        return tuple(
            Share(kind, sum(b.nbytes for b in some) / nbytes, sum(b.rows * b.cols for b in some) / weights)
            for kind, some in of_kind.items()
        )

    @property
    def by_neurons(self) -> bool:
        """Whether it has a record for each neuron."""
        return any(b.stride for b in self.blocks)

    @property
    def by_records(self) -> bool:
        """Whether these records have all weights, also those that are activated."""
        return self.blocks[0].stride > 0

    @property
    def width(self) -> int:
        """D of an FFN: columns of each neuron's weights."""
        down = self.block("down")
        return down.cols if down.stride else down.rows


_Shape = tuple[str, int, int, Format, bool]  # name, rows, columns, format, tiled


def _matrix(name: str, rows: int, cols: int, fmt: Format) -> _Shape:
    return name, rows, cols, fmt.within(cols), True


def _vector(name: str, cols: int) -> _Shape:
    return name, 1, cols, FLOAT32, False


def _part(
    key: str, kind: str, layer: int, rows: int, granule_rows: int, shapes: list[_Shape], experts: int = 1
) -> Part:  # fmt: skip
    blocks, offset = [], 0
    for name, _, n_cols, fmt, _ in shapes:
        if fmt.in_blocks and n_cols % fmt.group:
            raise BadRequest(
                f"{key}.{name} has {n_cols} columns in a granule, and {fmt.name} cuts rows into groups of {fmt.group}"
            )
    # Bytes of a record, which has a row of each block that lies neuron by neuron. These blocks follow each other.
    record = sum(fmt.row_bytes(cols) for _, _, cols, fmt, _ in shapes if fmt.neurons)
    for name, n_rows, n_cols, fmt, tiled in shapes:
        if fmt.neurons:
            blocks.append(Block(name, n_rows, n_cols, fmt, offset, tiled, record))
            last = shapes[len(blocks)][3].neurons if len(blocks) < len(shapes) else False
            row = fmt.row_bytes(n_cols)
            offset += row if last else row + (n_rows - 1) * record
            continue
        blocks.append(Block(name, n_rows, n_cols, fmt, offset, tiled))
        # 64-byte alignment of every matrix costs at most 63 bytes and gives kernels aligned loads.
        offset = round_up(offset + blocks[-1].nbytes, 64)
    return Part(key, kind, layer, rows, granule_rows, round_up(max(offset, 1), PAGE_BYTES), tuple(blocks), experts)


def _require_one_input(key: str, shapes: list[_Shape]) -> None:
    """Raises BadRequest unless matrices that are multiplied by the same rows want these laid out alike: as float32, or
    in groups of as many columns."""
    if len({(fmt.is_quantised, fmt.group) for _, _, _, fmt, _ in shapes}) > 1:
        named = ", ".join(f"{name} in {fmt.name}" for name, _, _, fmt, _ in shapes)
        raise BadRequest(f"{key} has {named}: kernels take them in formats with groups of as many columns only")


def heads_together(layer: Layer) -> int:
    """KV heads of a granule. Heads that are normed together go together, and so do those whose outputs are brought
    into one order."""
    return layer.attention.kv_heads if layer.attention.norms_all_heads or layer.ordered else 1


def _attention_part(i: int, layer: Layer, d: int, weights: Format) -> Part:
    a = layer.attention
    heads = heads_together(layer)
    q_rows, k_rows = heads * a.heads_per_kv * a.head_dim, heads * a.head_dim
    key = f"{i}.attn"
    shapes = [
        _matrix("q", q_rows, d, weights.of(key, "q")),
        _matrix("k", k_rows, d, weights.of(key, "k")),
        _matrix("v", k_rows, d, weights.of(key, "v")),
        _matrix("o", d, q_rows, weights.of(key, "o")),
    ]
    _require_one_input(key, shapes[:3])
    if a.qkv_bias:
        shapes += [
            _vector("q_bias", q_rows),
            _vector("k_bias", k_rows),
            _vector("v_bias", k_rows),
        ]
    return _part(key, "attn", i, a.kv_heads, heads, shapes)


def _ffn_parts(i: int, layer: Layer, d: int, fmt: Format, base: Format) -> list[Part]:
    """The parts of a layer's FFN: one part; or router, shared expert (if there is one) and experts."""
    if isinstance(layer.ffn, FfnSpec):
        return [_ffn_part(i, "ffn", layer.ffn, d, fmt)]
    ffn_parts, routed = [_router_part(i, layer.ffn, d, base)], layer.ffn
    ffn_parts += [_ffn_part(i, "shared", routed.shared, d, fmt)] if routed.shared is not None else []
    return [*ffn_parts, _ffn_part(i, "experts", routed.expert, d, fmt, routed.experts)]


def ffn_width(f: FfnSpec, d: int, formats: Mapping[str, Format]) -> int:
    """Neurons of a granule of an FFN in tiles whose matrices have these formats: as many as cost the fewest bytes, the
    fewest of equals. Where activations are zeros it is 64, for only whole granules can be left out."""
    if f.activation in RELUS:
        return GRANULE_ROWS
    names = ("gate", "up") if f.gated else ("up",)

    def nbytes(n: int) -> int:
        down = formats["down"].within(n).matrix_bytes(d, n)
        return -(-f.neurons // n) * (down + sum(formats[name].within(d).matrix_bytes(n, d) for name in names))

    return min(WIDE_ROWS, key=nbytes)


def _ffn_part(i: int, kind: str, f: FfnSpec, d: int, weights: Format, experts: int = 1) -> Part:
    key = f"{i}.{kind}"
    in_rows = weights.neurons and kind == "ffn"
    n = GRANULE_ROWS if in_rows else ffn_width(f, d, {name: weights.of(key, name) for name in ("gate", "up", "down")})
    shapes = [_matrix("gate", n, d, weights.of(key, "gate"))] if f.gated else []
    if weights.records and kind == "ffn":
        shapes = [(name, n, d, weights, False) for name in (*(["gate"] if f.gated else []), "up", "down")]
    elif weights.neurons and kind == "ffn":
        up = ("up", n, d, weights, False) if f.gated else _matrix("up", n, d, weights.of(key, "up"))
        shapes += [up, ("down", n, d, weights, False)]
    else:
        shapes += [_matrix("up", n, d, weights.of(key, "up")), _matrix("down", d, n, weights.of(key, "down"))]
        _require_one_input(key, shapes[:-1])
    if f.up_bias:
        shapes += [_vector("gate_bias", n)] if f.gated else []
        shapes += [_vector("up_bias", n)]
    return _part(key, kind, i, f.neurons, n, shapes, experts)


def _router_part(i: int, routed: Routed, d: int, base: Format) -> Part:
    shapes = [_matrix("scores", routed.experts, d, base)]
    shapes += [_vector("bias", routed.experts)] if routed.router.bias else []
    shapes += [_matrix("shared_gate", 1, d, base)] if routed.shared_gate else []
    return _part(f"{i}.router", "router", i, 1, 1, shapes)


def _norms_part(i: int, layer: Layer, model: ModelSpec) -> Part:
    d, norm = model.d_model, model.norm
    shapes: list[_Shape] = []
    for block in ("attn", "ffn"):
        for place, present in (("in", layer.norm_in), ("out", layer.norm_out), ("after", layer.norm_after)):
            if present and norm.affine and not (block == "ffn" and layer.parallel_norms == 1):
                shapes.append(_vector(f"{block}_{place}", d))
                if norm.has_bias:
                    shapes.append(_vector(f"{block}_{place}_bias", d))
    a = layer.attention
    if a.qk_norm:
        q_heads, k_heads = (a.heads, a.kv_heads) if a.norms_all_heads else (1, 1)
        shapes += [_vector("q_norm", q_heads * a.head_dim), _vector("k_norm", k_heads * a.head_dim)]
    if a.out_bias:
        shapes.append(_vector("o_bias", d))
    if a.sinks:
        shapes.append(_vector("sinks", a.heads))
    if layer.ordered:
        widths = {"attn": d, "o": a.heads * a.head_dim, "ffn": d}
        shapes += [_vector(f"{which}_order", width) for which, width in widths.items()]
    if isinstance(layer.ffn, FfnSpec) and layer.ffn.down_bias:
        shapes.append(_vector("down_bias", d))
    if layer.routed is not None and layer.routed.expert.down_bias:  # expert after expert
        shapes.append(_vector("experts_down_bias", layer.routed.experts * d))
    return _part(f"{i}.norms", "norms", i, 1, 1, shapes)


def _edges_part(model: ModelSpec, base: Format) -> Part:
    shapes: list[_Shape] = []
    if model.final_norm and model.norm.affine:
        shapes.append(_vector("final", model.d_model))
        if model.norm.has_bias:
            shapes.append(_vector("final_bias", model.d_model))
    if model.position_rows:
        shapes.append(("positions", model.position_rows, model.d_model, base, False))
    if model.d_embed != model.d_model:
        shapes += [
            _matrix("project_in", model.d_model, model.d_embed, base),
            _matrix("project_out", model.d_embed, model.d_model, base),
        ]
    return _part("edges", "edges", -1, 1, 1, shapes)


def active_columns(neurons: int) -> int:
    """Columns of what a predictor says of a row: a layer's neurons, in whole granules."""
    return round_up(neurons, GRANULE_ROWS)


@lru_cache(maxsize=1024)
def predictor_part(layer: int, d_model: int, rank: int, neurons: int, weights: Format) -> Part:
    """The predictor of a layer's active neurons (PowerInfer §5.1): two matrices and their biases in one granule, of
    neurons in whole granules. It belongs to a plan, not to the model: predictors are trained when a model is packed
    (`store.predictors`). Raises BadRequest for a format that matrices of these sizes cannot have."""
    columns = active_columns(neurons)
    shapes = [_matrix("hidden", rank, d_model, weights), _matrix("neurons", columns, rank, weights)]
    shapes += [_vector("hidden_bias", rank), _vector("neurons_bias", columns)]
    return _part(f"{layer}.predictor", "predictor", layer, 1, 1, shapes)


@lru_cache(maxsize=64)
def parts(model: ModelSpec, weights: Format) -> tuple[Part, ...]:
    """All parts in the order in which a pass reads them. A tied head is the part `embed`, read twice.

    `weights` has the formats of all matrices except routers, positions and projections, which stay in the checkpoint's
    own format. Norms and biases become float32. Raises BadRequest where FFNs should lie neuron by neuron, and some
    layer has experts; and for formats that the model's matrices cannot have.
    """
    if weights.neurons and not (model.fires or model.has_levels):
        raise BadRequest(f"{weights.name}: only dense FFNs lie neuron by neuron; take {weights.in_tiles.name}")
    base = Format(model.dtype)

    def vocabulary(key: str) -> Part:
        rows = _matrix("rows", GRANULE_ROWS, model.d_embed, weights.of(key, "rows"))
        return _part(key, key, -1, model.vocab, GRANULE_ROWS, [rows])

    in_order = [vocabulary("embed")]
    for i, layer in enumerate(model.layers):
        in_order += [
            _norms_part(i, layer, model),
            _attention_part(i, layer, model.d_model, weights),
            *_ffn_parts(i, layer, model.d_model, weights, base),
        ]
    in_order.append(_edges_part(model, base))
    if not model.tied:
        in_order.append(vocabulary("head"))
    return tuple(in_order)
