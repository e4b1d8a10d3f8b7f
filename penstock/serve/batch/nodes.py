"""The same batch on several machines, over Ray Data: an engine on each node, and blocks of lines as the unit of work.

The machine where the command runs keeps the journal. A block's answers come to it together. If a node dies, another one
answers its whole block again, and nothing is in the file twice. Each node finds the model as the command does: by a
path that all nodes have, or by a name on the Hub. A node whose model is another one is refused.
"""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.errors import BadRequest, DeviceFailed, PenstockError
from penstock.serve.counts import TokenCounts
from penstock.store.temporary import temporary_folder

if TYPE_CHECKING:
    from penstock.serve.batch.journal import Journal
    from penstock.serve.batch.lines import Lines
    from penstock.serve.batch.survey import Survey, Todo
    from penstock.serve.loading import Loading
    from penstock.spec.ask import Ask

# A node has so many blocks, or more of at most so many lines: a node that dies loses at most one of them.
_BLOCKS_A_NODE, _MOST_LINES = 8, 256
_MOST_RESTARTS = 3  # of a node's engine, and of a block that it was answering
_OURS = re.compile(r"^penstock\.errors\.\w+: (.+)$", re.MULTILINE)  # the last line of the trace of one of our errors
_MOST_WAIT_S = 60.0  # seconds to wait for the nodes' processors, which other work of the cluster may have


@dataclass(frozen=True)
class NodeWork:
    """What every node is to do.

    model       an absolute path or a name, as for `serve.source.resolve`
    weights     the model's format, as for `serve.source.resolve`
    sha256      the hash of the model here (`store.predictors.model_sha256`): a node with another model is refused
    left_out    the name of the predictors or levels here (`what_is_left_out`): a node with others is refused
    ask         an ask with answers of average length. Each node finds by itself how many answers at once pay
    how         how a node loads the model. Without a cache folder, a node takes its own
    names       names by which lines may call the model
    max_tokens  the most tokens of an answer whose line names no length
    answers     the number of answers that a node gets on average
    """

    model: str
    weights: str | None
    sha256: str
    left_out: str
    ask: Ask
    how: Loading
    names: tuple[str, ...]
    max_tokens: int
    answers: int


@dataclass
class Told:
    """Sums over all blocks so far. Peaks are those of the node that took most."""

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
        self.peak_host_bytes = max(self.peak_host_bytes, counts["peaks"]["host_bytes"])
        self.peak_device_bytes = max(self.peak_device_bytes, counts["peaks"]["device_bytes"])


class _BlockOfLines:
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
    """An engine on a node, which Ray keeps between blocks. Raises as `serve.source.resolve` and `Engine.open`, and
    BadRequest where the node's model is another one."""

    def __init__(self, work: NodeWork) -> None:
        from penstock.planner.firing import require_unpacked
        from penstock.serve.batch.sizing import best_ask
        from penstock.serve.batch.survey import Survey, Todo
        from penstock.serve.batch.what_is_left_out import what_is_left_out
        from penstock.serve.engine import Engine
        from penstock.serve.planning import describe
        from penstock.serve.source import resolve
        from penstock.store.predictors import model_sha256

        ask, how, self._work = work.ask, work.how, work
        source = resolve(
            work.model,
            weights=work.weights,
            cache=how.cache_folder,
            host_memory_bytes=ask.host_memory_bytes,
            verify=how.verify,
            chat=True,
            require=partial(require_unpacked, ask.sparsity),
        )
        if model_sha256(source.folder) != work.sha256:
            raise BadRequest(f"{work.model} is another model on this node")
        spec, _ = describe(source.folder, verify=how.verify)
        if what_is_left_out(ask.sparsity, source.folder, spec, None) != work.left_out:
            raise BadRequest(f"{work.model} has other predictors or levels on this node")
        average = Todo(0, work.answers, work.answers * ask.prompt_tokens, ask.output_tokens, -1)
        planned = replace(how, beside_bytes=how.beside_bytes + source.beside_bytes)
        self._engine = Engine.open(source, best_ask(ask, Survey([average]), source.model(how.verify), planned), how)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Answers a block: {"block": JSON} in, {"answers": JSON} out."""
        from penstock.serve.batch.answering import BatchRun
        from penstock.serve.batch.foretelling import Foretelling
        from penstock.serve.batch.survey import Survey, Todo

        lines = json.loads(row["block"])
        block = _BlockOfLines(lines)
        run = BatchRun(self._engine, block, block, self._work.names, self._work.max_tokens, Foretelling())
        done = run.run(Survey([Todo(*each["todo"]) for each in lines]))
        said = {"lines": done.lines, "failed": done.failed, "answers": done.answers, "tokens": asdict(done.tokens)}
        engine = self._engine
        peaks = {"host_bytes": engine.peak_host_bytes, "device_bytes": engine.session.peak_device_bytes}
        clock = {"seconds": done.clock.seconds, "tokens": done.clock.tokens}
        counts = {**said, "bytes_moved": done.bytes_moved, "clock": clock, "peaks": peaks}
        return {"answers": json.dumps({"added": block.added, "counts": counts})}


def blocks(lines: Lines, survey: Survey, nodes: int) -> Iterator[list[dict[str, Any]]]:
    """The lines to answer, block by block, in the order of the survey. In that order lines that begin alike follow each
    other, so one node gets them, as far as they fit a block."""
    size = max(1, min(_MOST_LINES, -(-len(survey.todo) // (_BLOCKS_A_NODE * nodes))))
    for first in range(0, len(survey.todo), size):
        yield [_line(lines, todo) for todo in survey.todo[first : first + size]]


def _line(lines: Lines, todo: Todo) -> dict[str, Any]:
    number = todo.number
    return {"number": number, "id": lines.id_of(number), "text": lines.text(number).decode(), "todo": [*todo]}


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Ray Data warns of its own settings, and of arguments that have no other form before its 2.64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@_without_warnings()
def answer(
    work: NodeWork, lines: Lines, journal: Journal, survey: Survey, nodes: int, hear: Callable[[dict[str, Any]], None]
) -> None:
    """Answers all lines that the survey has found, on the Ray cluster whose address the environment has, or on one of
    this machine alone. `hear`: is told what each block did (`Answerer`).

    Raises BadRequest without Ray, and where the cluster has too few processors; DeviceFailed where a node's engine
    failed; StorageFailed where the answers cannot be written."""
    try:
        import ray
        from ray.data import ActorPoolStrategy, DataContext
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    except ImportError:
        raise BadRequest("--nodes takes Ray: pip install 'penstock[ray]'") from None
    _keep_to_files("ray.data")
    started = not ray.is_initialized()
    if started:
        begin()
    try:
        there = [each["Resources"].get("CPU", 0) for each in ray.nodes() if each["Alive"]]
        cpus = _cpus_an_engine(there, nodes)
        # Before the engines take all processors: Ray looks at each block by a task.
        asked = ray.data.from_pandas_refs([ray.put(_table(each)) for each in blocks(lines, survey, nodes)])
        # Of each node the processors of one engine. Where nodes are fewer, a node holds several.
        places = ray.util.placement_group([{"CPU": cpus}] * nodes, strategy="SPREAD")
        if not places.wait(_MOST_WAIT_S):
            raise BadRequest(f"--nodes {nodes}: the processors of this Ray cluster are taken by other work")
        DataContext.get_current().enable_progress_bars = False
        answered = asked.map(
            Answerer,
            fn_constructor_args=(work,),
            compute=ActorPoolStrategy(size=nodes),
            num_cpus=cpus,
            max_restarts=_MOST_RESTARTS,
            max_task_retries=_MOST_RESTARTS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(places),
        )
        for row in answered.iter_rows():
            told = json.loads(row["answers"])
            for each in told["added"]:
                if each["number"] not in journal.done:
                    journal.add(each["number"], each["custom_id"], each["response"], each["error"])
            hear(told["counts"])
    except RayError as error:
        raise DeviceFailed(f"a node failed: {_why(error)}") from None
    finally:
        if started:
            ray.shutdown()


def begin() -> None:
    """Joins the Ray cluster, or begins one. Its workers get an empty folder to stand in: Ray would have them import
    from the folder in which the user stands."""
    import ray

    with temporary_folder() as empty:
        ray.init(log_to_driver=False, logging_level="warning", runtime_env={"working_dir": str(empty)})


def _table(block: list[dict[str, Any]]) -> Any:
    """A block as a row of Ray Data."""
    import pandas

    return pandas.DataFrame([{"block": json.dumps(block)}])


def _cpus_an_engine(cpus: Sequence[float], nodes: int) -> int:
    """How many processors each of `nodes` engines gets. `cpus`: the processors of each of the cluster's nodes. With
    enough nodes it is the number that the smallest of the nodes taken has. Else it is the largest number that all
    engines can have. Raises BadRequest if that is 0."""
    largest = sorted((int(each) for each in cpus), reverse=True)
    if len(largest) >= nodes and largest[nodes - 1]:
        return largest[nodes - 1]
    for best in range(max(largest, default=0), 0, -1):
        if sum(has // best for has in largest) >= nodes:
            return best
    raise BadRequest(f"--nodes {nodes}: this Ray cluster has {sum(largest)} processors")


def _keep_to_files(logger: str) -> None:
    """A log keeps its files and prints nothing: what the user has to know is said here, and Ray Data tells its progress
    every ten seconds otherwise."""
    for handler in logging.getLogger(logger).handlers:
        if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
            handler.setLevel(logging.CRITICAL + 1)


def _why(error: BaseException) -> str:
    """What a node's engine said in the end. Some versions of Ray keep of its errors only the text of the trace."""
    for each in _causes(error):
        if isinstance(each, PenstockError):
            return each.message
    said: list[str] = _OURS.findall(str(error))
    return (said or str(error).splitlines() or [type(error).__name__])[-1]


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and the errors that caused it."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or getattr(seen, "cause", None)
