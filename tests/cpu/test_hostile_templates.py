"""Chat templates that want all time or memory end in one line, within the limits; real ones render as before."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from penstock.errors import PenstockError
from penstock.serve import template
from penstock.serve.tokenizer import Tokenizer
from tests.cpu.commands import ROOT, machine_cache
from tests.cpu.hostile import checkpoint, refused, tokenizer_files, within_limits
from tests.cpu.test_chat_template import CONVERSATIONS, TOOLS, save
from tests.cpu.warm import Taken, Warm

REAL = ROOT.parent / "shared/data/templates"

MEMORY = {
    "string times": "{{ 'x' * 10**10 }}",
    "list times": "{{ [0] * 10**9 }}",
    "tuple times": "{{ (0,) * 10**9 }}",
    "string doubled": "{% set n = namespace(s='x') %}{% for i in range(64) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "list doubled": "{% set n = namespace(s=[1]) %}{% for i in range(64) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "output": "{% for a in range(99999) %}{% for b in range(99999) %}0123456789012345678{% endfor %}{% endfor %}",
    "join": "{{ range(99999) | join('x' * 99999) }}",
    "center": "{{ 'x' | center(10**10) }}",
    "replace": "{{ ('x' * 99999) | replace('x', 'x' * 99999) }}",
    "indent": "{{ ('\\n' * 9999999) | indent(999999) }}",
    "wordwrap": "{{ ('x ' * 99999999) | wordwrap(1) }}",
    "batch": "{{ [1] | batch(10**10, 0) | list }}",
    "sort": "{{ (range(99999) | list * 999) | sort | length }}",
    "%d": "{{ '%1000000000d' % 1 }}",
    "%*d": "{{ '%*d' % (10**9, 1) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format of a float": "{{ '{:.1000000000f}'.format(1.5) }}",
    "format filter": "{{ '%1000000000s' | format('x') }}",
    "tojson": "{{ [1] | tojson(indent=10**10) }}",
    "strftime": "{{ strftime_now('%Y' * 99999999) }}",
    "raise": "{{ raise_exception('x' * 10**8) }}",
}
MEMORY_OR_TIME = {"many statements": "".join(f"{{% set v{i} = 1 %}}" for i in range(30_000))}
TIME = {
    "nested range": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}" * 9,
    "macros": "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "lipsum": "{{ lipsum(10**7) }}",
    "power": "{{ 10 ** (10**8) }}",
    "powers in C": "{{ (3 ** (10**8)) % 7 }}",
}
OTHER = {
    "macro that calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "loop that calls itself": ("{% for x in [1] recursive %}{{ loop([x]) }}{% endfor %}", "recursion"),
    "deep parentheses": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nests too deep"),
    "deep statements": ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "nests too deep"),
    "deep nots": ("{{ " + "not " * 20000 + "1 }}", "nests too deep"),
    "escapes": ("{{ raise_exception('\\x1b]0;mine\\x07 no') }}", "no; `--raw`"),
    "answer": ("{{ 'x' * 3 * 10**6 }}", "gives more than 1.0"),
    "loader": ("{% include 'tokenizer.json' %}", "no loader"),
    "length": ("x" * 1_000_001, "chat_template.jinja"),
}


@pytest.fixture(scope="module")
def run(
    warm: Warm, hostile_weights: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Taken, Path]]:
    """`penstock run` of a checkpoint with this template: what it took, and the folder."""
    cache = machine_cache(tmp_path_factory.mktemp("cache"))

    def call(text: str) -> tuple[Taken, Path]:
        folder = checkpoint(tmp_path_factory.mktemp("model") / "model", hostile_weights)
        (folder / "chat_template.jinja").write_text(text)
        return warm.run("run", folder, "Hi", "--max-tokens", 1, "--cache", cache), folder

    return call


@pytest.mark.parametrize("name", MEMORY)
def test_memory(run: Callable[[str], tuple[Taken, Path]], name: str) -> None:
    refused(*run(MEMORY[name]), "chat_template.jinja: rendering a chat with it takes more than", "MiB of memory")


@pytest.mark.parametrize("name", MEMORY_OR_TIME)
def test_memory_or_time(run: Callable[[str], tuple[Taken, Path]], name: str) -> None:
    # A slow processor's time runs out before the template is parsed.
    refused(*run(MEMORY_OR_TIME[name]), "chat_template.jinja: ", " it takes more than ")


@pytest.mark.parametrize("name", TIME)
def test_time(run: Callable[[str], tuple[Taken, Path]], name: str) -> None:
    refused(*run(TIME[name]), "chat_template.jinja: rendering a chat with it takes more than 2 s of processor time")


@pytest.mark.parametrize("name", OTHER)
def test_other_harm(run: Callable[[str], tuple[Taken, Path]], name: str) -> None:
    text, says = OTHER[name]
    refused(*run(text), says)


def test_a_template_that_is_none_of_these(run: Callable[[str], tuple[Taken, Path]]) -> None:
    taken, folder = run("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert taken.code == 0, taken
    within_limits(taken, folder)


def test_a_template_in_tokenizer_config_is_named_by_that_file(tmp_path: Path, hostile_weights: Path) -> None:
    config = {**tokenizer_files()["tokenizer_config.json"], "chat_template": MEMORY["string times"]}
    tokenizer = Tokenizer.open(checkpoint(tmp_path / "model", hostile_weights, tokenizer_config_json=config))
    with pytest.raises(PenstockError, match=r"tokenizer_config\.json: rendering a chat"):
        tokenizer.chat([])
    assert tokenizer.encode("Hi") == [72, 105]  # a new child


def test_a_chat_of_2000_turns(tmp_path: Path) -> None:
    turn = [{"role": "user", "content": "a question of " * 20}, {"role": "assistant", "content": "an answer. " * 20}]
    llama = (REAL / "meta-llama-Llama-3.1-8B-Instruct.jinja") if REAL.is_dir() else None
    text = llama.read_text() if llama else "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}"
    tokenizer = save(tmp_path, text)
    shown = tokenizer.chat(turn * 1000)
    assert shown.count("a question of a question") >= 1000 and shown.count("an answer.") == 20_000


# Templates that fail in transformers where tools are given, for want of what we hand them.
OURS_ALONE = {
    "fireworks-ai-llama-3-firefunction-v2": "'functions' is undefined",
    "llama-cpp-deepseek-r1": "Object of type generator is not JSON serializable",
}


@pytest.mark.skipif(not REAL.is_dir(), reason="the templates of well-known models are not on this machine")
@pytest.mark.parametrize("file", sorted(REAL.glob("*.jinja")), ids=lambda file: file.stem)
def test_real_templates_render_as_transformers_renders_them(tmp_path: Path, file: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = save(tmp_path, file.read_text())
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    for messages, tools in itertools.product(CONVERSATIONS, (None, TOOLS)):
        in_child = said(tokenizer.chat, messages, tools)
        assert in_child == said(template.render, {"default": file.read_text()}, variables, messages, tools)
        theirs = said(partial(oracle.apply_chat_template, tokenize=False, add_generation_prompt=True), messages, tools)
        if theirs == OURS_ALONE.get(file.stem) and tools:
            assert all(tool["function"]["name"] in in_child for tool in tools)
        else:
            assert in_child == theirs or theirs in in_child


def said(render: Callable[..., str], *arguments: object) -> str:
    """The text, or the error's."""
    try:
        return render(*arguments)
    except Exception as error:
        return str(error)
