"""`python -m bench.gpu_warm FORMAT`: compiles what the probe of a card will launch, and throws the figures away.

Triton compiles one kernel after the other, some seconds each, and keeps them on disk; one process a format does it side
by side, before `bench.gpu` measures.
"""

from __future__ import annotations

import sys

import torch

from penstock.runtime.device.cuda.probe import KV_FORMATS, probe_device


def main() -> None:
    (fmt,) = sys.argv[1:]
    kv = KV_FORMATS if fmt == "int4" else ()
    found = probe_device(torch.device("cuda", 0), lambda: 1.0, print, formats=(fmt,), kv_formats=kv)
    print(f"{fmt}: {len(found.rates)} rates")


if __name__ == "__main__":
    main()
