"""Slots, and the types by which an op's definition says what the op does to each of its slots.

An op is a NamedTuple. A field of one of the types below is an operand: a slot, or several. Every other field is a
setting (a layer, whether the call starts a sum).
"""

from typing import Annotated, Any, NamedTuple


class Slot(NamedTuple):
    """A byte range of an arena. Edges between tasks are derived from slots that overlap."""

    arena: str
    lo: int
    hi: int

    @property
    def nbytes(self) -> int:
        return self.hi - self.lo

    def __str__(self) -> str:
        return f"{self.arena}[{self.lo}:{self.hi}]"


Read = Annotated[Slot, "r"]
Reads = Annotated[tuple[Slot, ...], "r"]
Write = Annotated[Slot, "w"]
Writes = Annotated[tuple[Slot, ...], "w"]
Added = Annotated[Slot, "+"]  # read and written
# Its writer comes first, but nothing is read: a later write need not wait.
Afters = Annotated[tuple[Slot, ...], "a"]
Scratch = Annotated[Slot, "s"]  # private to the lane, so it makes no edge

# Tolerances of the definitions. A sum of thousands of float32 products in another order differs by some 1e-6 of its
# terms' size. Exponentials and their divisors add a few more.
SUMS, EXPONENTIALS, BYTES = 1e-5, 5e-5, 0.0


class Operand(NamedTuple):
    """An operand of an op. `field`: its index in the tuple. `mode`: r read, w written, + added to, a comes after its
    writer, s scratch. `many`: the field is a tuple of slots."""

    field: int
    name: str
    mode: str
    many: bool


def operands_of(definition: type[Any]) -> tuple[Operand, ...]:
    """The operands of a definition, in order."""
    return tuple(
        Operand(i, name, of.__metadata__[0], of.__origin__ is not Slot)
        for i, (name, of) in enumerate(definition.__annotations__.items())
        if hasattr(of, "__metadata__")
    )
