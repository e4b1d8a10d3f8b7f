"""`python -m tests.beside_llamacpp`: random GGUF files of models as wide as real ones, beside llama.cpp.

`tests.at_size` compares a model with itself. Here the other side is llama.cpp, which reads the same file. llama.cpp
rounds activations to int8 wherever weights are quantised. So its own quantiser widens the file to float32 first, and
the logits that llama.cpp computes of that, with a float32 cache, are those which exact activations must give here. By
default activations are rounded here too, in another way than there: these logits may be as far off as llama.cpp's own
of the quantised file are, times ROUNDED. Needs llama_cpp and gguf.

    --cases N | --minutes M    how much (2 minutes)
    --first N                  begin with this case
    --case N                   this one alone

The last line is one JSON object; the exit code is 1 if anything differs.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import closing
from pathlib import Path

from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.spec.ask import Ask
from penstock.store.pack import pack
from tests.beside_llamacpp.draws import ROOM, VOCABULARY, Case, draw
from tests.beside_llamacpp.files import quantise, rewritten, write_floats
from tests.beside_llamacpp.peer import Peer
from tests.cpu.commands import MACHINE
from tests.numbered import search
from tests.steps import PROMPTS, STEPS, answers, distance, prompts

EXACT = 2e-4  # root mean square of what differs, over that of the logits
OF_GELU = 2e-3  # llama.cpp takes gelu from a table of float16
ROUNDED = 3.0


def differences(case: Case, folder: Path) -> tuple[list[str], dict[str, float]]:
    """What is too far off, and the largest distances."""
    floats, file, wide = (folder / f"{name}.gguf" for name in ("floats", "file", "wide"))
    write_floats(case, floats)
    quantise(floats, file, case.mix, case.pure, case.overrides)
    floats.unlink()
    quantise(file, wide, "all_f32", pure=True)
    ids = prompts(VOCABULARY, PROMPTS)
    with closing(Peer(wide)) as peer:
        expected = [peer.answers(each, STEPS) for each in ids]
    wide.unlink()
    model = file if case.files == 1 and case.alignment == 32 else rewritten(file, folder, case.files, case.alignment)
    with closing(Peer(model)) as peer:
        theirs = [peer.answers(each, STEPS) for each in ids]
    packed = pack(model, folder / "packed")
    found, largest = list[str](), {"exact": 0.0, "rounded": 0.0, "llama.cpp": 0.0}
    limit = OF_GELU if case.shape.architecture.startswith("gemma") else EXACT
    for name in ("exact", "rounded"):
        ask = Ask(context=ROOM, kv="float32", prompt_tokens=64, output_tokens=8)
        with closing(
            Engine.load(packed, ask, Loading(machine=MACHINE, device="none", exact=name == "exact"))
        ) as engine:
            for each, right, peers in zip(ids, expected, theirs, strict=True):
                ours = answers(engine, each)
                for at, (here, there, rounded) in enumerate(zip(ours, right, peers, strict=True)):
                    off, of_peer = distance(here, there), distance(rounded, there)
                    largest[name] = max(largest[name], off)
                    largest["llama.cpp"] = max(largest["llama.cpp"], of_peer)
                    if off > (limit if name == "exact" else max(limit, ROUNDED * of_peer)):
                        found.append(
                            f"{name}: {off:.2g} off after {len(each) - STEPS} + {at} tokens ({of_peer:.2g} there)"
                        )
    return found, largest


def judged(number: int) -> tuple[str, list[str]]:
    case = draw(number)
    with tempfile.TemporaryDirectory(prefix="penstock-beside-llamacpp-") as folder:
        try:
            found, largest = differences(case, Path(folder))
        except Exception as error:  # a refusal too: llama.cpp runs all of these
            found, largest = [f"{type(error).__name__}: {error}"], {}
    return f"{case} ({', '.join(f'{name} {off:.2g}' for name, off in largest.items())})", found


if __name__ == "__main__":
    sys.exit(search(__doc__ or "", judged))
