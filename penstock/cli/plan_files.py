"""`penstock plan` of a model that the Hub has in several GGUF files: how fast each of them would be here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import PenstockError
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.hubs.headers import Peeked
    from penstock.hubs.listing import Choice, Several
    from penstock.planner.predict import Prediction
    from penstock.planner.solve import Solved

_NAME_COLUMNS = 22


class PlannedFile(NamedTuple):
    """A file and its prediction. Without a prediction `why` says why."""

    choice: Choice
    predicted: Prediction | None
    why: str = ""


def plan_each(
    several: Several, peeked: Callable[[Choice], Peeked], solved: Callable[[Path], Solved]
) -> Iterator[PlannedFile]:
    """Plans each of the files. `peeked`, `solved`: a file's stand-in, and the plan by it."""
    for choice in several.choices:
        try:
            yield PlannedFile(choice, solved(peeked(choice).path).prediction)
        except PenstockError as error:
            yield PlannedFile(choice, None, error.message)


def table(planned: list[PlannedFile]) -> str:
    """A line for each file, without a newline at the end."""
    from penstock.planner.explain import rate

    names = [_name(each.choice, planned) for each in planned]
    line = f"{{:<{max(_NAME_COLUMNS, *map(len, names))}}}{{:>12}}{{:>12}}{{:>14}}{{:>16}}"
    lines = [line.format("", "size", "tokens/s", "first token", "disk per token")]
    for name, (choice, p, why) in zip(names, planned, strict=True):
        size = format_bytes(choice.nbytes)
        if p is None:
            lines.append(f"{line.format(name, size, '–', '–', '–')}  {why}")
            continue
        disk = format_bytes(p.disk_bytes_per_token) if p.disk_bytes_per_token else "–"
        lines.append(line.format(name, size, rate(p.decode_tokens_per_s), format_seconds(p.ttft_s), disk))
    return "\n".join(lines)


def report(planned: list[PlannedFile]) -> dict[str, Any]:
    """The JSON object."""
    from penstock.hubs.names import quantisation_of

    files = []
    for choice, p, why in planned:
        predicted = None if p is None else p.to_json()
        entry = {"file": choice.main, "quantisation": quantisation_of(choice.main), "bytes": choice.nbytes}
        files.append({**entry, "predicted": predicted, "why": why or None})
    return {"files": files}


def _name(choice: Choice, planned: list[PlannedFile]) -> str:
    """The quantisation, or the file's name where that is not its alone."""
    from penstock.hubs.names import quantisation_of

    labels = [quantisation_of(each.choice.main) for each in planned]
    label = quantisation_of(choice.main)
    return label if label and labels.count(label) == 1 else choice.main
