"""Emits the two ends of a pass: the embedding of its tokens, and the logits or the hidden states of its rows. A part of
the lowering."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.graph import ops
from penstock.graph.arenas import head_units
from penstock.graph.batch import Batch
from penstock.graph.calls import Calls
from penstock.graph.streams import Streams
from penstock.graph.tasks import Call, Pass, Slot, Task
from penstock.spec.places import DISK, HOST


class Ends:
    """The calls before the first layer and behind the last one. All of them but `gather` and `fetch` are the main
    executor's."""

    def __init__(self, calls: Calls, streams: Streams) -> None:
        self._calls, self._plan, self._layout, self._streams = calls, calls.plan, calls.layout, streams
        self._head = head_units(calls.plan)

    def embed(self, batch: Batch) -> None:
        """Emits what makes a batch's tokens its rows x, float32 [T, D]. The embedding rows are taken from memory, or
        read from the disk where that has the embedding."""
        calls = self._calls
        main, spec, layout = self._plan.main, self._plan.target.spec, self._layout
        t = batch.total_rows
        part, gatherer = layout.parts["embed"], layout.gathers or HOST
        tokens = layout.act(HOST, batch.id, "tokens", 4 * t)
        rows = layout.act(gatherer, batch.id, "rows", 4 * t * spec.d_embed)
        units = calls.units["embed"]
        if layout.staging is None:
            if gatherer != HOST:
                tokens = calls.copy(batch, "tokens", tokens.nbytes, HOST, gatherer)
            first, last = layout.weights[units[0]], layout.weights[units[-1]]
            weights = Slot(first.arena, first.lo, last.hi)
            calls.add(gatherer, ops.Gather(weights, tokens, rows), -1, batch, part.kinds(), (rows.nbytes, 0))
        else:
            read_bytes = t * part.granule_bytes  # the most: tokens that share a granule share its read
            fetch = ops.Fetch(tokens, rows, layout.staging)
            calls.emit.alone((DISK.reads,), Call(fetch, -1, batch, part.kinds(), read_bytes, 0))
        if gatherer != main:
            rows = calls.copy(batch, "rows", rows.nbytes, gatherer, main)
        x = layout.act(main, batch.id, "x", 4 * t * spec.d_model)
        embed = ops.Embed(rows, calls.whole("edges"), x, calls.scratch(main))
        calls.add(main, embed, -1, batch, "*", ops.rows_cost(spec, t, 2))

    def logits(self, p: Pass) -> Iterator[Task]:
        """Emits the final norm and the head, unit by unit, for the rows whose logits are wanted. The host gets the
        logits, float32 [n, vocab], and of each row the highest one with its token."""
        calls = self._calls
        main, spec, layout = self._plan.main, self._plan.target.spec, self._layout
        for batch in p.batches:
            calls.norm(batch, "edges", "final", None, batch.logits)
        for u in self._head:
            weights = self._streams.take(u, p.stream)
            part = layout.parts[self._plan.units[u].part]
            for batch in p.batches:
                n = len(batch.logits)
                if n:
                    h = layout.act(main, batch.id, "h", 4 * n * max(spec.d_model, spec.d_embed))
                    logits = layout.act(main, batch.id, "logits", 4 * n * spec.vocab)
                    cost = calls.matrix_cost(u, ops.VOCAB_BLOCKS, n)
                    best = layout.act(main, batch.id, "best", 8 * n)
                    head = ops.Head(weights, h, logits, best, calls.scratch(main), starts=u == self._head[0])
                    calls.add(main, head, u, batch, part.kinds(), cost)
            self._streams.release(u, p.stream)
            yield from calls.emit.closed()
        for batch in p.batches:
            n = len(batch.logits)
            if n and main != HOST:
                calls.copy(batch, "logits", 4 * n * spec.vocab, main, HOST)
                calls.copy(batch, "best", 8 * n, main, HOST)

    def hidden(self, batch: Batch) -> None:
        """Emits the final norm of all rows, and brings the hidden states, float32 [T, d_embed], to the host. They
        overwrite the embedding rows that the pass began with, which nobody reads any more. The host has room for these
        whichever executor computes."""
        calls, main, spec = self._calls, self._plan.main, self._plan.target.spec
        nbytes = 4 * batch.total_rows * spec.d_embed
        x, rows = calls.rows(main, batch, "x"), self._layout.act(main, batch.id, "rows", nbytes)
        norm = ops.Norm(calls.whole("edges"), x, rows, calls.scratch(main), which="final", layer=None, every=True)
        calls.add(main, norm, -1, batch, "*", ops.rows_cost(spec, batch.total_rows, 2))
        if main != HOST:
            calls.copy(batch, "rows", nbytes, main, HOST)
