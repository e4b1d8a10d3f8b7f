"""Everything of a plan but which granules stay: what the solvers of `residency` vary, and the bytes that it costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from penstock.graph.arenas import ARENA_ALIGN, Layout
from penstock.spec.ask import Ask
from penstock.spec.format import Format, parse_format
from penstock.spec.machine import USUAL_READS
from penstock.spec.model import ModelSpec
from penstock.spec.parts import SUM_GRANULES, Part, parts
from penstock.spec.plan import ActHome, KvHome, Plan, PlanModel, Predictor, Unit
from penstock.units import MIB, round_up

MAX_RING_BYTES = 256 * MIB
# A direct read of 4 MiB and more runs at the disk's full rate; below, each halving costs (docs/LOG.md).
UNIT_BYTES = 16 * MIB
CHUNK_ROWS = 512  # weights are read once a chunk; beyond, arithmetic hides the reading anyway
MIN_CHUNK_ROWS = 16
PINNED = ("norms", "edges")  # under 1 % of a model, and read at every step

Resident = dict[str, int]  # part key → granules that stay


@dataclass(frozen=True)
class Skeleton:
    """`kv_layers`: the first so many layers keep their KV in memory, the others on the disk: so the first load of a
    pass has their time to come in. `order`: of `spec.plan.ORDERS`."""

    ask: Ask
    spec: ModelSpec
    weights: Format
    process_bytes: int
    chunk_rows: int
    kv_layers: int
    order: str = "overlapped"

    def plan(self, ring_bytes: int, resident: Resident | None) -> Plan:
        """Complete. `resident`: granules that stay, part by part; None: everything does, and nothing streams."""
        ask, spec = self.ask, self.spec
        units: list[Unit] = []
        for part in parts(spec, self.weights):
            stay = part.granules if resident is None or part.kind in PINNED else resident.get(part.key, 0)
            units += _cut(part, stay, min(UNIT_BYTES, ring_bytes // 4))
        layers, seqs, fmt = len(spec.layers), (0, ask.batch), kv_format(ask, spec)
        spans = (((0, self.kv_layers), "host"), ((self.kv_layers, layers), "disk0"))
        return assembled(
            ask, spec, self.weights, units, [KvHome(span, seqs, home, fmt, "host") for span, home in spans],
            chunk_rows=self.chunk_rows, rings={"host": ring_bytes} if ring_bytes else {}, order=self.order,
            process_bytes=self.process_bytes,
        )  # fmt: skip


def assembled(
    ask: Ask, spec: ModelSpec, weights: Format, units: Sequence[Unit], kv: Sequence[KvHome], *, chunk_rows: int,
    rings: dict[str, int], order: str, process_bytes: int, main: str = "host", stage_bytes: int = 0,
    context_bytes: int = 0, batch_seqs: int | None = None, batches: int = 1, page: int | None = None,
    predictors: tuple[Predictor, ...] = (),
) -> Plan:  # fmt: skip
    """A complete plan out of what a solver decided, with its arenas. KV homes of no layers are left out. Reads are the
    usual ones until `with_reads` knows better. `process_bytes`: without the tokenizer. `batch_seqs`, `page` (tokens):
    the whole batch, and what suits the context, unless given."""
    assert ask.context is not None, "settle_context came first"
    seqs = ask.batch if batch_seqs is None else batch_seqs
    plan = Plan(
        models=(PlanModel(spec, weights),),
        units=tuple(units),
        kv=tuple(home for home in kv if home.layers[0] < home.layers[1]),
        acts=(ActHome((0, len(spec.layers)), (0, seqs * batches), main),),
        arenas=(),
        batches_per_pass=batches,
        batch_seqs=seqs,
        chunk_rows=chunk_rows,
        logits_rows=max(seqs, chunk_rows if ask.score else 0),
        context=ask.context,
        page_tokens=page or page_tokens(ask.context),
        ring_bytes=rings,
        stage_bytes=stage_bytes,
        order=order,
        io_block_bytes=USUAL_READS.block_bytes,
        io_depth=USUAL_READS.depth,
        io_engine=USUAL_READS.engine,
        process_bytes=round_up(process_bytes + spec.tokenizer_bytes, MIB),
        context_bytes=context_bytes,
        predictors=predictors,
    )
    return replace(plan, arenas=Layout(plan).arenas())


def kv_format(ask: Ask, spec: ModelSpec) -> Format:
    """float32 for a float32 model; otherwise float16, which keeps 8 times finer values than bfloat16 in
    the same bytes."""
    if ask.kv is not None:
        return parse_format(ask.kv)
    return Format("float32" if spec.dtype == "float32" else "float16")


def page_tokens(context: int) -> int:
    """Long contexts take long pages (less book-keeping), short ones short pages (less rounding)."""
    return 256 if context >= 1024 else 64


def kv_options(ask: Ask, spec: ModelSpec) -> Iterator[int]:
    """Layers whose KV stays in memory, by what is preferred."""
    layers = len(spec.layers)
    if ask.kv_home != "disk":
        yield layers
    if ask.kv_home is None and layers >= 4:
        yield from (layers * part // 4 for part in (3, 2, 1))
    if ask.kv_home != "memory":
        yield 0


def chunk_options(ask: Ask) -> list[int]:
    """Rows of a prompt's chunk to try, most first. Long prompts may take longer ones: each reads all that streams."""
    most = max(MIN_CHUNK_ROWS, min(CHUNK_ROWS, ask.context or CHUNK_ROWS))
    longer = [rows for rows in (2048, 1024) if rows <= min(ask.prompt_tokens, ask.context or 0) and rows > most]
    return [*longer, most, *(rows for rows in (128, 32, MIN_CHUNK_ROWS) if rows < most)]


def ring_options(spec: ModelSpec, weights: Format) -> list[int]:
    """Rings to try, the smallest first. It holds the largest granule once; twice where possible, so that
    the disk reads while the processor computes."""
    streamed = [part for part in parts(spec, weights) if part.kind not in PINNED]
    least = max(part.granule_bytes for part in streamed)
    total = sum(part.nbytes for part in streamed)
    wanted = {2 * least, total // 16, total // 8, 64 * MIB, 128 * MIB, MAX_RING_BYTES}
    whole = {max(n // ARENA_ALIGN, 1) * ARENA_ALIGN for n in wanted}  # an arena is charged in whole huge pages anyway
    most = min(MAX_RING_BYTES, total // 2)
    return [least, *sorted(n for n in whole if 2 * least <= n <= most)]


def _cut(part: Part, stay: int, unit_bytes: int) -> list[Unit]:
    """The first `stay` granules in memory, the rest in even units of about `unit_bytes` on disk."""
    units = [Unit(part.key, 0, stay, "host", "host", "host")] if stay else []
    streamed = even_units(part, stay, part.granules, unit_bytes)
    return units + [Unit(part.key, lo, hi, "disk0", "host", "host") for lo, hi in streamed]


def even_units(part: Part, lo: int, hi: int, unit_bytes: int) -> list[tuple[int, int]]:
    """Granules lo..hi in even ranges of at most `unit_bytes`, or of one granule. An FFN's begin at whole fours, which
    are summed together: one that is cut costs another pass over its rows."""
    if hi <= lo:
        return []
    per_unit = max(1, unit_bytes // part.granule_bytes)
    step = SUM_GRANULES if part.kind == "ffn" and per_unit >= 4 * SUM_GRANULES else 1
    count = 1 if per_unit >= hi - lo else -(-(hi - lo) // (per_unit - step + 1))
    inner = ((lo + (hi - lo) * i // count) // step * step for i in range(1, count))
    return list(pairwise([lo, *(edge for edge in inner if edge > lo), hi]))
