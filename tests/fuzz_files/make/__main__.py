"""Writes the seeds that follow a rule over those that are there."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tests.fuzz_files import child, warm
from tests.fuzz_files.corpus import SEEDS
from tests.fuzz_files.make import gguf, kept, models, texts
from tests.fuzz_files.world import Files, World


def main() -> None:
    _write("machine", kept.machine_files())
    _write("gguf", gguf.files())
    warm.warm_up()
    scratch = Path(tempfile.mkdtemp())
    try:
        world = World(scratch, lambda argv: child.run(argv, scratch, scratch, None, scratch, limited=False).code)
        _write("config", models.configs())
        _write("shard", models.shards(world))
        _write("index", models.indices(world))
        _write("tokenizer", texts.tokenizers(world))
        _write("tokenizer_config", texts.tokenizer_configs(world))
        _write("generation_config", texts.generation_configs())
        _write("special_tokens_map", texts.special_tokens_maps())
        _write("manifest", kept.manifests(world))
        _write("sums", kept.sums(world))
        _write("packed_shard", kept.packed_headers(world))
        _write("history", kept.histories())
        _write("answers", kept.answers())
        _write("profile", kept.profiles())
        _write("levels", kept.levels())
        _write("plan", kept.plans(world, scratch / "plans"))
        _write("resume", kept.resumes(world, scratch / "resumes"))  # last: it starts threads
    finally:
        shutil.rmtree(scratch)


def _write(kind: str, files: Files) -> None:
    folder = SEEDS / kind
    folder.mkdir(parents=True, exist_ok=True)
    for name in {file.name for file in folder.iterdir()} - files.keys():
        (folder / name).unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)


if __name__ == "__main__":
    main()
