"""The native extension: what Python cannot do fast, or at all. Built from csrc/.

Addresses and byte counts are plain integers; whoever passes an address keeps its memory alive until the call is over.
Everything that takes longer than microseconds releases the GIL.
"""

import os
from collections.abc import Sequence
from typing import final

from typing_extensions import Buffer

from penstock.graph.cache import ExpertCache as PythonCache

def cpu_features() -> list[str]:
    """What the processor has and the operating system lets us use: "avx2", "avx512vnni", "amx_int8", "neon" …"""

@final
class Memory(Buffer):
    """Anonymous memory, zeroed, starting on a 2 MiB boundary; freed with its last view, or by `close`.

    A writable buffer of bytes: `numpy.frombuffer(memory, numpy.uint8)` looks at it without a copy and keeps it alive.
    """

    def __init__(self, nbytes: int, huge: bool = True) -> None:
        """MemoryError, with the number of bytes, if there is no address space for it."""

    @property
    def address(self) -> int:
        """ValueError once closed."""

    @property
    def nbytes(self) -> int: ...
    @property
    def huge(self) -> bool:
        """Whether the kernel accepted the advice to use huge pages."""

    def populate(self, threads: int = 1, lo: int = 0, hi: int | None = None) -> None:
        """Makes the pages of bytes lo..hi (None: the end) present by so many threads, so that no later access faults.
        Contents stay, and others may write there meanwhile. `lo`: a multiple of 4096, else ValueError."""

    def close(self) -> None:
        """Gives the memory back now. BufferError while a view of it exists; a second call does nothing."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

def read_into(fd: int, offset: int, address: int, nbytes: int, block_bytes: int) -> int:
    """Reads up to `nbytes` from `offset` to `address` in blocks of at most `block_bytes`; returns the bytes read.

    Fewer than asked for means the end of the file. A direct file wants offset, address, nbytes and block_bytes in
    multiples of its disk's sector; 4 KiB always does.
    """

class Damaged(Exception):
    """A granule is not what its checksum says. `args[0]`: its number in the load, from 0."""

def granule_sums(address: int, count: int, stride: int, isa: str | None = None) -> bytes:
    """Checksums of `count` granules of `stride` bytes (more than 240), 8 bytes each, little-endian: XXH3 of 64 bits
    without a seed, the same by all kernels. `isa`: None is the fastest. ValueError where there are none of that name.
    """

def repack(
    kind: str, from_address: int, row_bytes: int, rows: int, blocks: int, first_column: int, cols: int, slices: int,
    to_address: int, slice_bytes: int,
) -> bool:  # fmt: skip
    """Puts blocks of a GGUF file into tiles (`spec.blocks`), with the GIL released. `kind`: "q4_k" …; "int4" for Q4_1.
    `rows` rows of `blocks` blocks lie `row_bytes` apart. Slice i of `slices` is columns first_column + i · cols … of
    them; its tiles go to to_address + i · slice_bytes. False where float16 numbers are NaN or infinite. ValueError
    where `cols` is no multiple of 32, or `first_column` lies within a tile's block.
    """

@final
class Sums:
    """Checksums as `granule_sums` gives them, and which granules were compared and right. Several readers may share
    one."""

    def __init__(self, content: bytes) -> None: ...
    def __len__(self) -> int: ...
    def checked(self, first: int, count: int) -> bool:
        """Whether each of these granules was read and right once. ValueError beyond the last."""

@final
class Begun:
    """A load that a Reader was given. Its file and memory must stay until it is done."""

    @property
    def done(self) -> bool: ...
    @property
    def arrived(self) -> int:
        """Bytes from the load's start on that are there and right; 0 while it is under way."""

    @property
    def span_s(self) -> tuple[float, float]:
        """When its first block was begun and its last one done, on the clock of time.perf_counter. ValueError while it
        is under way."""

    def wait(self) -> int:
        """Returns the bytes read when it is done; fewer than asked for means the end of the file. Raises OSError with
        the first failed block's errno, Damaged where a granule before that is not right, and what a signal handler
        raises."""

@final
class Reader:
    """Keeps `depth` blocks of the loads that it was given in flight, in order, across loads; by native threads or an
    io_uring. Loads that write the same memory follow each other."""

    def __init__(self, engine: str, depth: int, block_bytes: int) -> None:
        """`engine`: "threads" or "io_uring"; OSError where the kernel refuses that. ValueError for a `depth` beyond 1
        to 256 or blocks beyond 1 byte to 1 GiB."""

    @property
    def engine(self) -> str: ...
    @property
    def depth(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def bytes_read(self) -> int:
        """What all reads of blocks have returned so far."""

    def start(
        self, fd: int, offset: int, address: int, nbytes: int, sums: Sums | None = None, first: int = 0, stride: int = 0
    ) -> Begun:
        """Queues a read of `nbytes` from `offset` to `address`. A direct file wants all three, and block_bytes, in
        multiples of its disk's sector; 4 KiB always does. ValueError for negative ones, and once closed.

        `sums`: the bytes are granules of `stride` bytes, from number `first` on. Each that was not right before is
        compared, by a thread of the reader's own, before the load is done. ValueError where `sums` has no such."""

    def start_runs(self, fd: int, runs: Sequence[tuple[int, int, int]]) -> Begun:
        """The same for runs (offset, address, nbytes), as one load. ValueError where there is none, or an empty one, or
        where their addresses do not rise, or overlap."""

    def read(
        self, fd: int, offset: int, address: int, nbytes: int, sums: Sums | None = None, first: int = 0, stride: int = 0
    ) -> int:
        """Reads, and compares, by the calling thread, past the queue and in one block; returns and raises as
        `Begun.wait`."""

    def close(self) -> None:
        """Returns when nothing is under way; what was not begun fails with ECANCELED. A second call does nothing."""

    def inject(self, at: int, error: int = 0, most_bytes: int = 0, forever: bool = True) -> None:
        """For tests. The read of a block that is number `at` from now on (from 1; 0: none), or from it on all, fails
        with the errno `error`; where that is 0 it returns at most `most_bytes`, of which 0 mean the file's end."""

def open_direct(path: str | os.PathLike[str]) -> tuple[int, bool]:
    """A read-only descriptor, and whether it bypasses the page cache (False: the file system knows no O_DIRECT)."""

def drop_cached(fd: int, offset: int, nbytes: int) -> None:
    """Tells the kernel that the page cache need not keep this range."""

def ram_read_s(address: int, nbytes: int, threads: int, repeats: int) -> float:
    """Median seconds that `threads` pinned threads take to read `nbytes` once. ValueError if there are fewer CPUs."""

def peak_per_s(kind: str, threads: int, isa: str | None = None) -> float:
    """Operations per second (a multiplication and an addition are two) of products in registers, "int8" or "float32",
    by the instructions of the kernels `isa` (None: the fastest) on `threads` pinned threads. ValueError as
    `ram_read_s`, and where there are no such kernels."""

class Matrix:
    """A block of a granule: [rows, cols] at a byte offset, in tiles of 16 rows, or with a `row_stride` neuron by
    neuron. ValueError for an unknown kind, or where rows would overlap."""

    def __init__(self, rows: int, cols: int, kind: str, group: int, offset: int, row_stride: int = 0) -> None: ...
    @property
    def tile_bytes(self) -> int: ...
    @property
    def tiles(self) -> int: ...

class FfnShape:
    """Blocks of an FFN's granule; bias offsets 0 where there is none."""

    def __init__(
        self, gate: Matrix | None, up: Matrix, down: Matrix, activation: str, gate_bias: int, up_bias: int
    ) -> None: ...

class QkvShape:
    def __init__(
        self, q: Matrix, k: Matrix, v: Matrix, q_bias: int, k_bias: int, v_bias: int, norm_eps: float, rope_dims: int,
        norms_all_heads: bool,
    ) -> None: ...  # fmt: skip

class RouterShape:
    """A router: matrices of scores and of the shared expert's gate in one granule, and a bias at an address of float32
    [X] (0: none), which is part of the scores or of the choice alone. ValueError for `bias_scored` without a bias."""

    def __init__(
        self, scores: Matrix, gate: Matrix | None, bias: int, bias_scored: bool, softmax: bool, normalised: bool,
        groups: int, groups_kept: int, scale: float, active: int,
    ) -> None: ...  # fmt: skip

class AttentionShape:
    """Attention of KV heads lo..hi."""

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, lo: int, hi: int, scale: float, softcap: float, window: int
    ) -> None: ...

class CacheShape:
    """A KV cache in pages, as spec/format.py draws them. ValueError for sizes that the kernels cannot walk."""

    def __init__(self, kind: str, group: int, kv_heads: int, page_tokens: int, head_dim: int) -> None: ...

class Norm:
    """A norm whose weight and bias lie at addresses of float32 [D] (0: none); kinds "none", "rms", "layer"."""

    def __init__(self, kind: str, eps: float, offset: float, weight: int, bias: int) -> None: ...

def limits() -> dict[str, int]:
    """Of formats, as spec/format.py has them: "most_group", "weight_group", "kv_group" (columns), "page_tokens",
    "sum_neurons", "tile_rows"."""

# Bytes of scratch that an op wants for calls of at most `rows` rows on as many as 8 threads: with them it is as fast as
# it can be. `count`: granules of a call, the first of which begins a four.

def project_scratch(matrix: Matrix, rows: int) -> int:
    """Also of `head`."""

def out_scratch(matrix: Matrix, count: int, rows: int) -> int: ...
def ffn_scratch(shape: FfnShape, count: int, rows: int) -> int: ...
def predict_scratch(hidden: Matrix, neurons: Matrix, rows: int) -> int: ...
def route_scratch(shape: RouterShape, rows: int) -> int: ...
def experts_scratch(shape: FfnShape, per_expert: int, active: int, rows: int) -> int: ...
def qkv_scratch(shape: QkvShape, attention: AttentionShape, rows: int) -> int: ...
def attend_scratch(attention: AttentionShape, cache: CacheShape, rows: int, chosen: int = 0) -> int:
    """`rows`: of one sequence. `chosen`: the most positions of a sequence, of which only a share counts; 0: all do."""

def merge_scratch(rows: int, d: int) -> int: ...

# op → the names of its operands, in the order of the native struct
op_fields: dict[str, tuple[str, ...]]

class _Ops:
    """The ops. Operands are given by name: those of an op's definition (`graph/ops`) are called as they are there. All
    arrays cross as addresses of float32, or of int32 where that is said. `t`: rows."""

    def project(
        self, *, weights: int, count: int, stride: int, matrix: Matrix, x: int, x_stride: int, t: int, out: int,
        out_stride: int, out_cols: int, exact: bool, scratch: int, scratch_bytes: int,
    ) -> None:  # fmt: skip
        """out [t, count · matrix.rows] = x · block of each granule, at most `out_cols` columns of it."""

    def head(
        self, *, weights: int, count: int, stride: int, matrix: Matrix, h: int, h_stride: int, t: int, logits: int,
        out_stride: int, out_cols: int, softcap: float, first_token: int, best: int, starts: bool, exact: bool,
        scratch: int, scratch_bytes: int,
    ) -> None:  # fmt: skip
        """The same for logits, capped where softcap > 0. `best` [t] of (float32, int32), 0: not wanted: the largest
        logit and its id so far, from nothing where it starts; the first column is `first_token`."""

    def out(
        self, *, weights: int, count: int, stride: int, matrix: Matrix, a: int, a_stride: int, t: int, partial: int,
        starts_sum: bool, exact: bool, scratch: int, scratch_bytes: int,
    ) -> None:  # fmt: skip
        """partial [t, matrix.rows] (+)= a · block, granule after granule, each with its own columns of a."""

    def ffn(
        self, *, weights: int, count: int, stride: int, shape: FfnShape, h: int, t: int, partial: int, pending: int,
        granule: int, starts_sum: bool, continues_four: bool, leaves_four: bool, skips: bool, fired: int,
        fired_stride: int, exact: bool, scratch: int, scratch_bytes: int, active: int, active_stride: int,
        level: float, values: int, biases: int, bias_stride: int,
    ) -> None:  # fmt: skip
        """partial [t, D] (+)= down · act(gate h) * (up h) of every granule, by fours of the layer's, whose granule
        number `granule` comes first. pending [t, D]: the sum of a four that the call before left or this one leaves.
        `skips`: what act(…) = 0 multiplies may be left out. fired uint8 [t, fired_stride] (0: not wanted): whether each
        neuron's act(…) was not 0. active uint8 [t, active_stride] (0: all are): act(…) counts as 0 where it is 0, and
        where |act(…)| is below `level`.
        values [count, t, 64] (0: they are computed): what `fire` gave. biases (0: with the weights): of records and at
        most 4 rows, granules with the biases, `bias_stride` bytes apart."""

    def fire(
        self, *, weights: int, count: int, stride: int, shape: FfnShape, h: int, t: int, values: int, exact: bool,
        scratch: int, scratch_bytes: int,
    ) -> None:  # fmt: skip
        """values [count, t, 64] = act(gate h), or act(up h), of every granule, for at most 8 rows."""

    def predict(
        self, *, weights: int, hidden: Matrix, neurons: Matrix, hidden_bias: int, neurons_bias: int, h: int, t: int,
        active: int, exact: bool, scratch: int, scratch_bytes: int,
    ) -> None:  # fmt: skip
        """active uint8 [t, neurons.rows] = whether neurons · relu(hidden · h + hidden_bias) + neurons_bias > 0. Biases
        lie at these bytes of `weights`."""

    def route(
        self, *, weights: int, shape: RouterShape, h: int, t: int, routes: int, scratch: int, scratch_bytes: int
    ) -> None:
        """routes = the experts of each row of h: ids int32 [t, A], weights [t, A], the shared expert's weight [t]."""

    def experts(
        self, *, weights: Sequence[int], ids: Sequence[int], stride: int, shape: FfnShape, per_expert: int, active: int,
        h: int, t: int, routes: int, partial: int, outputs: int, starts_sum: bool, exact: bool, scratch: int,
        scratch_bytes: int,
    ) -> None:  # fmt: skip
        """partial [t, D] (+)= Σ weight · FFN of the experts `ids`, upwards, which begin at `weights`. Where `outputs`
        [t, A, D] is not 0 each FFN goes there instead, and partial is left alone."""

    def combine(
        self, *, routes: int, outputs: int, active: int, t: int, d: int, partial: int, starts_sum: bool
    ) -> None:
        """partial [t, d] (+)= Σ weight · outputs [t, A, d], in the order of the routes."""

    def gate(self, *, routes: int, active: int, t: int, d: int, partial: int) -> None:
        """partial [t, d] times the shared expert's weights."""

    def qkv(
        self, *, weights: int, count: int, stride: int, shape: QkvShape, attention: AttentionShape, h: int, t: int,
        q_norm: int, k_norm: int, cos: int, sin: int, sequences: int, sequence_count: int, pages: int, q: int,
        cache: CacheShape, keys: int, values: int, exact: bool, scratch: int, scratch_bytes: int,
    ) -> None:  # fmt: skip
        """q [t, H, E], and k and v into the cache, for the KV heads of `attention`. `sequences`: int32 [n, 3], of each
        its first entry in `pages`, start and rows. `pages`: int32, page ids."""

    def attend(
        self, *, attention: AttentionShape, sinks: int, sequences: int, sequence_count: int, pages: int, q: int,
        cache: CacheShape, keys: int, values: int, a: int, exact: bool, scratch: int, scratch_bytes: int,
        value_share: float,
    ) -> None:  # fmt: skip
        """a [t, H, E] = softmax(scale · q kᵀ) v over the cache. sinks [H] (0: none): scores without values. `exact`:
        what multiplies codes of the cache is not rounded to 16 bits (`graph.ops.Attend`).
        `value_share`: below 1, over that share of the positions that a row sees, those with the best scores."""

    def norm(self, *, norm: Norm, x: int, chosen: int, t: int, d: int, h: int) -> None:
        """h [t, d] = norm of x's rows, or of those that `chosen` int32 [t] names (0: all)."""

    def order(self, *, order: int, rows: int, t: int, d: int, scratch: int, scratch_bytes: int) -> None:
        """Column i of rows [t, d] becomes what column order[i] was. `order` float32 [d]: what is no column counts as
        0."""

    def merge(
        self, *, out: Norm, after: Norm, bias: int, x: int, partials: Sequence[int], t: int, d: int, scratch: int,
        scratch_bytes: int, expert_bias: int, routes: int, active: int,
    ) -> None:  # fmt: skip
        """x += out(sum of partials + bias), then x = after(x). expert_bias [X, d] (0: none): the bias is also Σ weight
        · that of each of a row's experts, in the order of `routes`."""

    def embed(self, *, rows: int, embed_scale: float, t: int, d: int, x: int) -> None:
        """x = embed_scale · rows."""

    def gather(self, *, weights: int, count: int, stride: int, matrix: Matrix, tokens: int, t: int, rows: int) -> None:
        """rows [t, matrix.cols] = those of `tokens` int32 [t] in the granules."""

    def widen(
        self, *, weights: int, count: int, stride: int, matrix: Matrix, wide: Matrix, out: int, out_stride: int
    ) -> None:
        """Integer weights as floats: the block `matrix` of each granule becomes the block `wide`, float32 or float16,
        of granules `out_stride` bytes apart at `out`. ValueError for other formats and where the shapes differ."""

class Compute(_Ops):
    """The kernels of one instruction set on a pool of threads, run at once. ValueError where there are none of that
    name, and from ops whose scratch does not hold one granule's temporaries."""

    def __init__(self, isa: str, threads: int) -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...

class Program(_Ops):
    """Ops written down, to run in order with no Python in between, as often as wanted: addresses stay the same, what
    lies there may change."""

    def __init__(self, compute: Compute) -> None: ...
    def __len__(self) -> int: ...
    def place(self, weights: Sequence[int], ids: Sequence[int]) -> None:
        """Replaces the experts of the latest call for experts, and where their weights lie. Raises ValueError where
        there is no such call, or as that call."""

    def follow(self, counts: int) -> None:
        """Ops that are written down from now on have as many rows as `counts` says whenever they run: the address of
        int32 [3], the rows, rows with logits and sequences of their batch. 0: as many as when they were written
        down."""

    def run(self) -> None:
        """Runs the ops. Returns when no read of a Demand is under way. Raises LoadFailed."""

    def ask(self, demand: Demand) -> None:
        """Appends: takes the router's answer, and begins to read what the demand's cache misses."""

    def guess(self, demand: Demand, routes: int, guesses: int) -> None:
        """Appends: begins to read experts that are likely to be asked for: of each row of the answer at `routes`, at
        most `guesses` that are missing, by their weights."""

    def compute_asked(self, demand: Demand) -> None:
        """Appends: computes what was asked for: first the experts in the cache, then the others as they come."""

    @property
    def spans(self) -> list[tuple[float, float]]:
        """When the ops before, between and after the steps of demands ran last, in seconds of time.perf_counter."""

class LoadFailed(Exception):
    """A read of a Demand failed. Its arguments: layer, expert, errno (0: too few bytes, or wrong ones), how many bytes
    are right, and the expert's granule whose checksum is wrong, or None."""

@final
class ExpertCache(PythonCache):
    """Has the methods of `graph.cache.ExpertCache`, and their answers. ValueError for experts beyond 0 to 65535. It is
    a subclass to type checkers alone."""

@final
class Demand:
    """The experts of a layer that its router asks for, in programs."""

    def __init__(
        self, layer: int, cache: ExpertCache, experts: Program, slots: Sequence[int],
        homes: Sequence[tuple[Reader, int, int, int]], sums: Sums | None, ahead: Sequence[tuple[int, int]],
        poisoned: bool,
    ) -> None:  # fmt: skip
        """`experts`: its latest call for experts has all operands but which experts, and where they lie. `slots`: the
        addresses of the cache's. `homes`: of each expert the reader, the file, the offset, the number of its first
        checksum. `ahead`: addresses and bytes that the ops after these experts read; while a read is waited for,
        they are brought into the processor's caches. `poisoned`: slots are filled with NaN before each read. ValueError
        where these do not fit."""

    def give(self, rows: Sequence[Sequence[int]]) -> None:
        """The experts of each row that the next `ask` takes in place of the router's. ValueError for other experts than
        the layer has, or another number of them."""

    def give_guess(self, rows: Sequence[Sequence[int]]) -> None:
        """The same for the next `guess`: any number of each row, the likeliest first."""

    @property
    def said(self) -> list[list[int]]:
        """The latest answer: the experts of each row."""

    @property
    def guessed(self) -> list[list[int]]: ...
    @property
    def loaded_bytes(self) -> int:
        """That the latest run read."""

    @property
    def loaded(self) -> list[tuple[float, float, int]]:
        """Of each read of the latest run when it began and ended, in seconds of time.perf_counter, and its expert."""

    @property
    def computed(self) -> list[tuple[float, float, int]]:
        """The same of each call that computed experts, and how many these were."""
