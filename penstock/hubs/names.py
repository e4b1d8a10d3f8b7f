"""Names of models on the Hub, as users type them: `org/name[:revision][/file.gguf]` or `org/name:Q4_K_M`.

`hf.co/` and `https://huggingface.co/` may stand before them. With such a beginning a name is the Hub's, whatever folder
is here. Without it a folder or file of that name comes first.

What stands behind the colon is a quantisation if it is spelt as one (`Q4_K_M`, `IQ4_XS`, `BF16`). Else it is a
revision: a branch, a tag, a commit, or `refs/pr/1`. A slash in a branch's name is written %2F.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote

from penstock.errors import BadRequest

MAIN = "main"  # the revision where none is named
_MAX_NAME, _MAX_SEGMENT_BYTES, _MAX_PATH = 96, 255, 1000

_SITE = r"(?:https://)?(?:hf\.co|huggingface\.co)/"
_NAME = re.compile(
    rf"(?P<site>{_SITE})?(?P<repo>[a-z0-9_][\w.-]*/[a-z0-9_][\w.-]*)"
    r"(?::(?P<tag>refs/[^/:\s]+/[^/:\s]+|[^/:\s]+))?(?:/(?P<file>\S.*\.gguf))?",
    re.ASCII | re.IGNORECASE,
)
_QUANTISATION = r"(?:UD-)?(?:I?Q[1-8](?:_[0-9A-Z]+)+|TQ[12]_0|MXFP4(?:_MOE)?|BF16|FP?16|FP?32)"
_WHOLE_QUANTISATION = re.compile(_QUANTISATION, re.ASCII | re.IGNORECASE)
_QUANTISATION_IN_NAME = re.compile(rf"(?<![0-9A-Za-z])({_QUANTISATION})(?![0-9A-Za-z_])", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on the Hub. `quantisation`: which of its GGUF files is wanted; or `file`, the name of one of them. ""
    where the name says nothing of it. `sure`: the name begins with the Hub's address."""

    repo: str
    revision: str = MAIN
    quantisation: str = ""
    file: str = ""
    sure: bool = False

    def __str__(self) -> str:
        tag = self.quantisation or (self.revision if self.revision != MAIN else "")
        return f"{self.repo}{':' if tag else ''}{tag}{'/' if self.file else ''}{self.file}"


def hub_name(text: str) -> HubName | None:
    """The Hub's model that a MODEL argument names; None where it is no such name. Raises BadRequest where it begins as
    one and goes on with what no name has."""
    match = _NAME.fullmatch(text.rstrip("/"))
    sure = re.match(_SITE, text, re.IGNORECASE) is not None
    if sure and (match is None or match["site"] is None):
        raise BadRequest(f"{text:.200} is no model of the Hub: write hf.co/org/name[:revision][/file.gguf]")
    if match is None:
        return None
    repo, tag, file = match["repo"], match["tag"] or "", match["file"] or ""
    if ".." in repo or "--" in repo or len(repo) > _MAX_NAME or repo.endswith((".git", ".", "-")):
        return None
    quantisation = tag.upper() if _WHOLE_QUANTISATION.fullmatch(tag) else ""
    revision = MAIN if quantisation or not tag else unquote(tag)
    if quantisation and file:
        raise BadRequest(f"{text:.200} names a quantisation and a file: one of them says which")
    for path in filter(None, (revision, file)):
        if not is_plain(path):
            raise BadRequest(f"{text:.200}: {path[:100]!r} is no name that can stand on the Hub")
    return HubName(repo, revision, quantisation, file, sure)


def is_plain(path: str) -> bool:
    """Whether a path of a repository leads to a place below it: no `..`, nothing empty, nothing that is not printable,
    nothing that a file system takes for something else."""
    return len(path) <= _MAX_PATH and all(
        part not in ("", ".", "..")
        and part.isprintable()
        and "\\" not in part
        and len(part.encode(errors="replace")) <= _MAX_SEGMENT_BYTES
        for part in path.split("/")
    )


def quantisation_of(path: str) -> str:
    """The quantisation that a GGUF file's name tells, in capitals; or its folder's, as `Q4_K_M/model-00001-of-3.gguf`.
    "" where neither does."""
    for part in reversed(path.split("/")):
        if names := _QUANTISATION_IN_NAME.findall(part.removesuffix(".gguf")):
            return str(names[-1]).upper()
    return ""
