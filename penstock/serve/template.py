"""Renders a model's own chat template (Jinja, from its folder) as transformers renders it.

A template is code that somebody put beside weights. It runs in jinja2's immutable sandbox, and sees plain JSON values
only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import BadRequest, BrokenModel
from penstock.serve.text_files import MAX_TEMPLATE_BYTES, template_files
from penstock.store.files import read_text

if TYPE_CHECKING:
    import jinja2

Message = dict[str, Any]


def read_templates(
    folder: Path, tokenizer_config: dict[str, Any], reads: Callable[[Path], None] = lambda _: None
) -> dict[str, str]:
    """Name → text of each template, {} where the model has none. Files of templates win over tokenizer_config.json.
    `reads` is called with each file before it is opened. Raises BrokenModel for a file that is no text."""
    templates: dict[str, str] = {}
    for name, path in template_files(folder).items():
        if os.path.lexists(path):
            reads(path)
            templates[name] = read_text(path, MAX_TEMPLATE_BYTES)
    given = tokenizer_config.get("chat_template")
    if templates or not given:
        return templates
    if isinstance(given, list):
        return {str(entry.get("name")): str(entry.get("template")) for entry in given if isinstance(entry, dict)}
    return {"default": str(given)}


def check_templates(templates: dict[str, str]) -> None:
    """Parses every template, and runs none. Raises BrokenModel with the parser's message."""
    for name, source in templates.items():
        try:
            _environment().parse(source)
        except MemoryError:
            raise
        except Exception as error:
            said = " ".join(str(error).split()) or type(error).__name__
            if isinstance(error, RecursionError):
                said = "it nests too deep"
            raise BrokenModel(
                f"the model's chat template {name!r} cannot be parsed: {said[:300]}; `run --raw` goes without it"
            ) from None


def render(templates: dict[str, str], variables: dict[str, str], messages: list[Message], tools: Any) -> str:
    """The prompt up to the point where the assistant speaks. Raises BadRequest with the template's own message."""
    # Among several templates, `tool_use` is for requests with tools. A lone template serves all requests.
    name = "tool_use" if tools and "tool_use" in templates else "default"
    source = templates.get(name) or next(iter(templates.values()))
    try:
        data = json.loads(json.dumps({"messages": messages, "tools": tools}))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"messages and tools should be JSON: {error}") from None
    try:
        template = _environment().from_string(source)
        names = {**variables, **_named_by_some(data["tools"]), **data}
        return template.render(**names, documents=None, add_generation_prompt=True)
    except MemoryError:
        raise
    except Exception as error:  # any error that the template's code raised
        said = " ".join(str(error).split()) or type(error).__name__
        raise BadRequest(f"the model's chat template fails: {said[:300]}; `--raw` goes without it") from None


def _named_by_some(tools: Any) -> dict[str, Any]:
    """What single families call the tools (Fireworks' Firefunction)."""
    if tools is None:
        return {}
    functions = json.dumps([tool.get("function") for tool in tools], indent=4)
    return {"functions": functions, "datetime": datetime.now().strftime("%Y-%m-%d %H:%M")}


def render_plain(messages: list[Message]) -> str:
    """The prompt for models without a template: lines of User and Assistant, which a base model can continue."""
    return "\n".join([*map(_plain_line, messages), "Assistant:"])


def _plain_line(message: Message) -> str:
    """An answer stands as it was generated: most models begin it with a space of their own."""
    name, said = str(message.get("role", "user")).capitalize(), message.get("content") or ""
    begun = name == "Assistant" and str(said)[:1].isspace()
    return f"{name}:{'' if begun else ' '}{said}"


def _environment() -> jinja2.Environment:
    import jinja2.ext
    import jinja2.nodes
    import jinja2.utils
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(jinja2.ext.Extension):
        """`{% generation %}` marks the text that training learns from. A prompt has the body of the tag in its
        place."""

        tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Any) -> Any:
            return caller()

    class Namespace(jinja2.utils.Namespace):
        """A namespace without names that begin with an underscore, which could shadow the interpreter's attributes."""

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise jinja2.TemplateError(f"a namespace cannot hold {name!r}")
            super().__setitem__(name, value)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return datetime.now().strftime(pattern)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        # Jinja's own filter escapes HTML, and no model was trained on that. `map` and its like leave an iterator, which
        # stands for a list.
        value = list(value) if isinstance(value, Iterator) else value
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now, namespace=Namespace)
    return environment
