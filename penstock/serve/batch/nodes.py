"""The same batch on several machines, over Ray Data: an engine on each node, and blocks of lines as the unit of work.

The machine where the command runs keeps the journal. A block's answers come to it together. So what a node that died
had answered of its block is answered again by another, and nothing is in the file twice. Models are found on each node
as they are here: by a path that all nodes have, or a name on the Hub.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from penstock.errors import BadRequest, DeviceFailed, PenstockError
from penstock.serve.counts import TokenCounts

if TYPE_CHECKING:
    from penstock.serve.batch.journal import Journal
    from penstock.serve.batch.lines import Lines
    from penstock.serve.batch.survey import Survey, Todo
    from penstock.serve.loading import Loading
    from penstock.spec.ask import Ask

# A node has so many blocks, or more of at most so many lines: it loses at most one of them.
_BLOCKS_A_NODE, _MOST_LINES = 8, 256


@dataclass(frozen=True)
class NodeWork:
    """What every node is to do. `model`, `weights`: as for `serve.source.resolve`. `ask`: of answers of average length,
    as many at once as pays on each node by itself. `answers`: that a node gets on average. `how`: for loading there;
    a cache folder is the node's own."""

    model: str
    weights: str | None
    ask: Ask
    how: Loading
    names: tuple[str, ...]
    max_tokens: int
    answers: int


@dataclass
class Told:
    """What all blocks did so far. Peaks are those of the node that took most."""

    lines: int = 0
    failed: int = 0
    answers: int = 0
    tokens: TokenCounts = field(default_factory=TokenCounts)
    decode_s: float = 0.0  # of passes that only decode, of all nodes together
    decoded: int = 0  # tokens in them
    bytes_moved: dict[str, int] = field(default_factory=dict)
    peak_host_bytes: int = 0
    peak_device_bytes: int = 0

    @property
    def decode_tokens_per_s(self) -> float:
        """Of a node, on average."""
        return self.decoded / self.decode_s if self.decode_s else 0.0

    def add(self, counts: dict[str, Any]) -> None:
        """Adds what a block did (`Answerer`)."""
        self.lines += counts["lines"]
        self.failed += counts["failed"]
        self.answers += counts["answers"]
        for name, count in counts["tokens"].items():
            setattr(self.tokens, name, getattr(self.tokens, name) + count)
        self.decode_s += counts["clock"]["seconds"]
        self.decoded += counts["clock"]["tokens"]
        for lane, count in counts["bytes_moved"].items():
            self.bytes_moved[lane] = self.bytes_moved.get(lane, 0) + count
        self.peak_host_bytes = max(self.peak_host_bytes, counts["peaks"]["host"])
        self.peak_device_bytes = max(self.peak_device_bytes, counts["peaks"]["device"])


class _Block:
    """A block's lines, and a journal of their answers in memory."""

    def __init__(self, lines: Sequence[dict[str, Any]]) -> None:
        self._lines = {each["number"]: each for each in lines}
        self.added: list[dict[str, Any]] = []

    def text(self, number: int) -> bytes:
        return str(self._lines[number]["text"]).encode()

    def id_of(self, number: int) -> str:
        return str(self._lines[number]["id"])

    def add(self, number: int, custom_id: str | None, response: Any, error: Any = None) -> None:
        self.added.append({"number": number, "custom_id": custom_id, "response": response, "error": error})


class Answerer:
    """An engine on a node, which Ray keeps between blocks."""

    def __init__(self, work: NodeWork) -> None:
        from penstock.serve.batch.sizing import best_ask
        from penstock.serve.batch.survey import Survey, Todo
        from penstock.serve.engine import Engine
        from penstock.serve.source import resolve

        ask, self._work = work.ask, work
        limit, cache = ask.host_memory_bytes, work.how.cache_folder
        source = resolve(
            work.model, weights=work.weights, cache=cache, host_memory_bytes=limit, verify=work.how.verify, chat=True
        )
        average = Todo(0, work.answers, work.answers * ask.prompt_tokens, ask.output_tokens, -1)
        how = replace(work.how, beside_bytes=work.how.beside_bytes + source.beside_bytes)
        ask = best_ask(ask, Survey([average]), source.folder, how)
        self._engine = Engine.open(source, ask, work.how)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Answers a block: {"block": JSON} in, {"answers": JSON} out."""
        from penstock.serve.batch.answering import BatchRun
        from penstock.serve.batch.foretelling import Foretelling
        from penstock.serve.batch.survey import Survey, Todo

        lines = json.loads(row["block"])
        block = _Block(lines)
        run = BatchRun(self._engine, block, block, self._work.names, self._work.max_tokens, Foretelling())
        done = run.run(Survey([Todo(*each["todo"]) for each in lines]))
        said = {"lines": done.lines, "failed": done.failed, "answers": done.answers, "tokens": asdict(done.tokens)}
        peaks = {"host": self._engine.peak_host_bytes, "device": self._engine.session.peak_device_bytes}
        clock = {"seconds": done.clock.seconds, "tokens": done.clock.tokens}
        counts = {**said, "bytes_moved": done.bytes_moved, "clock": clock, "peaks": peaks}
        return {"answers": json.dumps({"added": block.added, "counts": counts})}


def blocks(lines: Lines, found: Survey, nodes: int) -> Iterator[list[dict[str, Any]]]:
    """The lines that are to be answered, block by block in the order of the survey: those that begin alike go to one
    node as far as they fit a block."""
    size = max(1, min(_MOST_LINES, -(-len(found.todo) // (_BLOCKS_A_NODE * nodes))))
    for at in range(0, len(found.todo), size):
        yield [_line(lines, each) for each in found.todo[at : at + size]]


def _line(lines: Lines, todo: Todo) -> dict[str, Any]:
    number = todo.number
    return {"number": number, "id": lines.id_of(number), "text": lines.text(number).decode(), "todo": list(todo)}


def answer(
    work: NodeWork, lines: Lines, journal: Journal, found: Survey, nodes: int, hear: Callable[[dict[str, Any]], None]
) -> None:
    """Answers all lines that the survey has found. `hear`: is told what each block did (`Answerer`). Raises BadRequest
    without Ray; DeviceFailed where a node's engine failed; StorageFailed where the answers cannot be written."""
    try:
        import ray
        from ray.data import ActorPoolStrategy, DataContext
        from ray.exceptions import RayError
    except ImportError:
        raise BadRequest("--nodes takes Ray: pip install 'penstock[ray]'") from None
    started = not ray.is_initialized()
    if started:
        ray.init(log_to_driver=False)
    try:
        cpus = int(ray.cluster_resources().get("CPU", 0)) // nodes
        if not cpus:
            raise BadRequest(f"--nodes {nodes}: this Ray cluster has fewer processors")
        DataContext.get_current().enable_progress_bars = False
        rows = [{"block": json.dumps(each)} for each in blocks(lines, found, nodes)]
        data = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
            Answerer, fn_constructor_args=(work,), num_cpus=cpus, compute=ActorPoolStrategy(size=nodes),
        )  # fmt: skip
        for row in data.iter_rows():
            told = json.loads(row["answers"])
            for each in told["added"]:
                if each["number"] not in journal.done:
                    journal.add(each["number"], each["custom_id"], each["response"], each["error"])
            hear(told["counts"])
    except RayError as error:
        cause = next((each for each in _causes(error) if isinstance(each, PenstockError)), None)
        raise DeviceFailed(f"a node failed: {cause.message if cause else str(error).splitlines()[-1]}") from None
    finally:
        if started:
            ray.shutdown()


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and those that it came from."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or getattr(seen, "cause", None)
