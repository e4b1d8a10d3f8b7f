"""The user's request: lengths, batch, limits and choices. None means "choose for me". A Plan has no None left."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import BadRequest
from penstock.spec.format import parse_format

DEFAULT_CONTEXT = 4096
# Rows of a prompt that `LLM` and the server score in a pass. With a vocabulary of 128k entries they take 16 MiB.
DEFAULT_SCORE_ROWS = 32
DEVICES = ("auto", "cuda", "none", "emulated")  # names that a user may give
# What is done about neurons that do not fire. off: everything is computed. exact: what their zero multiplies is left
# out, which changes no result. predict: predictors say which neurons are computed, which may change results.
# threshold: activations below a layer's level count as zeros, which changes results. auto: exact, where there are
# neurons that do not fire.
SPARSITIES = ("auto", "off", "exact", "predict", "threshold")
LOSSY = ("predict", "threshold")  # of these
MOST = 2**31 - 1  # tokens. More is a typing error, and sums of it would leave a float's range
# Sequences at once. Planning takes time for each of them: 10,000 take seconds, a million took an hour.
MOST_SEQUENCES = 2**14


@dataclass(frozen=True, slots=True)
class Ask:
    """`host_memory_bytes`: limit of the whole process. `device_memory_bytes`: limit of the device's memory.

    `resident_bytes`: at most so many bytes of weights stay in memory. `context`: the most tokens of a sequence.
    `grow_context`: the context is as long as costs no speed (`planner/room`). `kv_tokens`: KV room in tokens of all
    sequences together, which then share pages, and at least for one whole context; None: room for the whole context of
    each. `batch`: sequences at once. `kv`: number format of the KV cache. `kv_home`: "memory" or "disk". `score`: every
    pass has the logits of all its rows of prompts, not of the last one alone. `score_rows`: a pass of prompts may have
    the logits of so many rows, for prompts that are scored now and then. `sparsity`: one of SPARSITIES. `use_device`:
    where there is a device, plans that do not use it are left out. `attention`: "full", or "top-k:SHARE", by which a
    query sees all keys, but the values of its best positions alone (FlexGen §4); then KV lies where attention runs.

    Raises BadRequest for a value that no plan could have.
    """

    prompt_tokens: int = 64
    output_tokens: int = 64
    batch: int = 1
    context: int | None = None
    objective: str = "latency"
    host_memory_bytes: int | None = None
    device_memory_bytes: int | None = None
    resident_bytes: int | None = None
    kv: str | None = None
    kv_home: str | None = None
    score: bool = False
    score_rows: int = 0
    use_device: bool = False
    kv_tokens: int | None = None
    sparsity: str = "auto"
    grow_context: bool = False
    attention: str = "full"

    def __post_init__(self) -> None:
        if self.objective not in ("latency", "throughput"):
            raise BadRequest(f"objective {self.objective!r} should be latency or throughput")
        if self.kv_home not in (None, "memory", "disk"):
            raise BadRequest(f"KV home {self.kv_home!r} should be memory or disk")
        if self.value_share < 1 and self.kv_home == "disk":
            raise BadRequest(
                f"attention {self.attention} reads single values where attention runs, and KV on a disk comes in whole"
                " pages: it goes with KV in memory"
            )
        if self.sparsity not in SPARSITIES:
            raise BadRequest(f"sparsity {self.sparsity!r} should be one of {', '.join(SPARSITIES)}")
        for name in ("prompt_tokens", "output_tokens", "batch", "context", "kv_tokens"):
            value = getattr(self, name)
            most = MOST_SEQUENCES if name == "batch" else MOST
            if value is not None and not 1 <= value <= most:
                raise BadRequest(f"{name} is {value}; it should be from 1 to {most}")
        if not 0 <= self.score_rows <= MOST:
            raise BadRequest(f"score_rows is {self.score_rows}; it should be from 0 to {MOST}")
        if self.grow_context and self.context is not None:
            raise BadRequest("a context is named, or grows: not both")
        for name in ("host_memory_bytes", "device_memory_bytes", "resident_bytes"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 2**63:
                raise BadRequest(f"{name} is {value}; it should be from 0 to 2**63")
        if self.kv is not None:
            parse_format(self.kv).check_kv()

    @property
    def sequence_tokens(self) -> int:
        """Tokens of a prompt and its answer."""
        return self.prompt_tokens + self.output_tokens

    @property
    def value_share(self) -> float:
        """Of the positions that a query sees, the share whose values count (`Plan.value_share`). Raises BadRequest."""
        return value_share(self.attention)


def value_share(attention: str) -> float:
    """The share that "top-k:SHARE" names; 1 for "full". Raises BadRequest for anything else."""
    if attention == "full":
        return 1.0
    name, colon, text = attention.partition(":")
    try:
        share = float(text) if name == "top-k" and colon else 0.0
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise BadRequest(f"attention {attention!r} should be full, or top-k: and a share, such as top-k:0.1")
    return share


def check_device(name: str) -> None:
    """Raises BadRequest for a name that is none of DEVICES."""
    if name not in DEVICES:
        raise BadRequest(f"device {name!r} should be one of {', '.join(DEVICES)}")
