"""The closed set of errors. Each says who must act, carries its numbers, and prints as one line."""

from __future__ import annotations

from typing import Any, ClassVar


class PenstockError(Exception):
    """A fault that the user can mend (exit code 2), unless a subclass says otherwise."""

    exit_code: ClassVar[int] = 2

    def __init__(self, message: str, **numbers: Any) -> None:
        super().__init__(message)
        self.message = message
        self.numbers = numbers

    def to_json(self) -> dict[str, Any]:
        """The value of `error` in `--json` output."""
        return {"type": type(self).__name__, "message": self.message, **self.numbers}


class BadRequest(PenstockError):
    """A flag, argument or input file that makes no sense, or asks for what this version cannot do."""


class UnsupportedModel(PenstockError):
    """A model whose architecture or number format penstock does not run."""


class BrokenModel(PenstockError):
    """A checkpoint or packed model that is truncated, inconsistent or corrupt."""


class DamagedModel(BrokenModel):
    """A packed model whose bytes are not those that were packed. Weights name file, part and granule."""


class DoesNotFit(PenstockError):
    """The request needs more of a tier than there is. With exactly `minimum_bytes` it fits."""

    def __init__(self, message: str, *, tier: str, need_bytes: int, have_bytes: int, minimum_bytes: int) -> None:
        super().__init__(
            message,
            tier=tier,
            need_bytes=need_bytes,
            have_bytes=have_bytes,
            minimum_bytes=minimum_bytes,
        )


class StorageFailed(PenstockError):
    """The disk is full, a file vanished or a read failed while we used it."""


class DeviceFailed(PenstockError):
    """The device, its driver or its memory failed, or another process took what was free."""


class InternalError(PenstockError):
    """A fault of ours, found by a check such as `graph.verify` (exit code 1)."""

    exit_code: ClassVar[int] = 1
