"""What a published figure is, and which of the papers' models and machines have no file here."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.units import GIB

# Instead of a model or a machine, where a figure sums up several.
SEVERAL = "several"

LAPTOP = "laptop-rtx3060-6gb"  # PIPO, section 4.1
DESKTOP = "pc-rtx4090-64gb"  # PIPO, appendix C.5
T4 = "cloud-t4-208gb"  # FlexGen, Table 1
BED_A, BED_B, BED_C = "server-a6000-48gb", "server-rtx3090-24gb", "server-rtx2080ti-11gb"  # ScheInfer, section V-A
PC_HIGH, PC_LOW = "pc-rtx4090-192gb", "pc-rtx2080ti-64gb"  # PowerInfer, section 8.1

METRICS = {
    "throughput": "tokens generated a second, the prompts' time counted, summed over the batch",
    "decode_tokens_per_s": "tokens generated a second once the prompts are done, summed over the batch",
    "ttft_s": "seconds to the first token",
    "decode_s": "seconds between two tokens of a sequence",
    "latency_s": "seconds for the whole answer",
    "seconds": "seconds of the part that `setting` names",
    "speedup": "times as fast as `against`",
    "slowdown": "share of the speed of `against` that is missing",
    "share": "the fraction that `setting` names",
    "sparsity": "share of the FFN's neurons that are not active, a token",
    "device_gb": "GB of device memory in use, as printed",
    "host_gb": "GB of the host's memory in use, as printed",
    "predictor_weights": "weights of the predictors of active neurons",
}

# Models of the papers that `ModelSpec` cannot say yet, and why; penstock/shapes/SOURCES.md has the same list.
UNSUPPORTED = {
    "mixtral-8x7b": "experts",
    "mixtral-8x22b": "experts",
    "qwen2-57b-a14b": "experts",
    "phi-3.5-moe": "experts",
    "deepseek-r1-671b": "experts, latent attention",
    "falcon-relu-40b": "attention and FFN side by side in a layer",
    "bamboo-7b": "ReLU on both gate and up",
    "qwen2-14b": "no dense model of this name was published",
}

# Machines that a figure names, but that are no paper's test bed.
UNSUPPORTED_MACHINES = {"a100-80gb": "a server's GPU that holds the whole model: nothing to place"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One figure as a paper prints it (times in seconds, shares as fractions).

    `system`: whose figure it is; `against`: of a ratio, the other one. `weights` and `kv` are formats. None: the paper
    does not say; memory None: all of the machine's. `note`: what is assumed or contradicts itself.
    """

    paper: str
    table: str
    setting: str
    system: str
    machine: str
    model: str
    metric: str
    value: float
    against: str = ""
    weights: str | None = None
    kv: str | None = None
    prompt: int | None = None
    output: int | None = None
    batch: int | None = None
    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    note: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        """All but value and note: what must differ between two figures."""
        return tuple(getattr(self, name) for name in self.__slots__ if name not in ("value", "note"))


def device_gb(count: int) -> int:
    """A paper's limit of device memory in bytes. Its GB are read as GiB, as makers of GPUs count."""
    return count * GIB
