"""Chat templates in the manner of well-known models, rendered as transformers renders them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from penstock.errors import BadRequest, BrokenModel
from penstock.serve.tokenizer import Tokenizer

CHATML = """{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if tools %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(found=false) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% set ns.found = true %}{% endif %}
    {%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim %}
    {{- content + '<|eot_id|>' }}
{%- endfor %}
Today: {{ date_string }}, system: {{ ns.found }}
{% if add_generation_prompt %}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{% endif %}
"""

GEMMA = """{{ bos_token }}\
{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""

TRAINING = """{% for m in messages %}
{% if m.role == 'tool' %}{% continue %}{% endif %}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}
[{{ m.content | upper }}]{{ pad_token }}{% endif %}
{% endfor %}"""

# Of Gemma 3: contents in pieces, and what the system says stands before the first question.
GEMMA3 = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set before = messages[0]['content'] + '\n\n' -%}
    {%- else -%}
        {%- set before = messages[0]['content'][0]['text'] + '\n\n' -%}
    {%- endif -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set before, rest = '', messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (before if loop.first else '') }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for piece in message['content'] -%}
            {%- if piece['type'] == 'text' %}{{ piece['text'] | trim }}{% endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception('content is of no kind that is known') }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif -%}"""

# Of gpt-oss: macros that call each other, names of channels, the day, thoughts of all but the last answer left out.
HARMONY = """{%- macro kind(of) -%}
    {%- if of.type == 'array' -%}{{ kind(of['items']) }}[]
    {%- elif of.type is defined and of.type is iterable and of.type is not string -%}{{ of.type | join(' | ') }}
    {%- elif of.enum -%}{{ '"' + of.enum | join('" | "') + '"' }}
    {%- else -%}{{ of.type or 'any' }}{%- endif -%}
{%- endmacro -%}
{%- macro functions(tools) -%}
    {{- 'namespace functions {\n\n' }}
    {%- for tool in tools %}{% set tool = tool.function %}
        {{- '// ' + tool.description + '\ntype ' + tool.name + ' = (_: {' }}
        {%- for name, of in tool.parameters.properties.items() if tool.parameters.properties %}
            {{- '\n' + name + ': ' + kind(of) + ',' }}
        {%- endfor %}{{- '}) => any;\n\n' }}
    {%- endfor %}{{- '} // namespace functions' }}
{%- endmacro -%}
{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '\nReasoning: ' }}
{%- set effort = reasoning_effort if reasoning_effort is defined else 'medium' %}{{- effort + '<|end|>' }}
{%- set ns = namespace(last_tool=none, developer='') %}
{%- if messages[0].role in ('developer', 'system') %}
    {%- set ns.developer = messages[0].content %}{% set messages = messages[1:] %}
{%- endif %}
{%- if ns.developer or tools %}{{- '<|start|>developer<|message|>' + ns.developer }}
    {%- if tools %}{{- '\n\n# Tools\n\n' + functions(tools) }}{% endif %}{{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set later = messages[loop.index:] | selectattr('role', 'equalto', 'assistant') | list %}
        {%- if 'thinking' in message and not later %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif -%}"""

CONVERSATIONS = [
    [{"role": "user", "content": " What is <b>2 & 2</b>? é\n"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!  "},
        {"role": "user", "content": "Bye"},
    ],
    [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "Hi"}],
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "a < b & 'c' é", "parameters": {}}}]


def save(folder, template=None, **config):
    from tokenizers import Tokenizer as Core
    from tokenizers import models, processors

    words = ["<unk>", "<s>", "</s>", "User:", "Hi"]
    core = Core(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    core.save(str(folder / "tokenizer.json"))
    bos = {"__type": "AddedToken", "content": "<s>", "special": True}
    config = {"bos_token": bos, "eos_token": "</s>", "pad_token": None, **config}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.open(folder)


def both(folder, messages, tools=None):
    """Our rendering, and that of transformers; an error is its type."""
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    results = []
    for render in (
        lambda: Tokenizer.open(folder).chat(messages, tools),
        lambda: oracle.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True),
    ):
        try:
            results.append(render())
        except Exception as error:
            results.append(str(error))
    return results


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize(
    "template",
    [CHATML, LLAMA3, GEMMA, TRAINING, GEMMA3, HARMONY],
    ids=["chatml", "llama3", "gemma", "training", "gemma3", "harmony"],
)
def test_as_transformers_renders(tmp_path, template, messages):
    save(tmp_path, template)
    ours, theirs = both(tmp_path, messages)
    if template is GEMMA and messages[0]["role"] == "system":
        assert theirs == "System role not supported"
        assert theirs in ours
    else:
        assert ours == theirs


def test_tools_and_named_templates(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": CHATML}]
    save(tmp_path, named)
    for tools in (None, TOOLS):
        ours, theirs = both(tmp_path, CONVERSATIONS[0], tools)
        assert ours == theirs
        assert ("a < b & 'c' é" in ours) == bool(tools)


PUBLISHED = sorted((Path(__file__).parents[3] / "shared/data/templates").glob("*.jinja"))


@pytest.mark.skipif(not PUBLISHED, reason="no published templates are on this machine")
@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: file.stem)
def test_published_templates(tmp_path, file):
    """Each renders what transformers renders, or both say that it cannot."""
    save(tmp_path, file.read_text(encoding="utf-8"))
    for messages in CONVERSATIONS:
        ours, theirs = both(tmp_path, messages)
        assert ours == theirs or theirs in ours


def test_harmony_with_tools(tmp_path):
    save(tmp_path, HARMONY)
    of = {"a": {"type": "number"}, "b": {"type": "array", "items": {"type": "string"}}, "c": {"enum": ["x", "y"]}}
    tool = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": of}}
    thinks = {"role": "assistant", "content": "Hello", "thinking": "A greeting."}
    messages = [*CONVERSATIONS[2], thinks, {"role": "user", "content": "Bye"}]
    ours, theirs = both(tmp_path, messages, [{"type": "function", "function": tool}])
    assert ours == theirs and 'c: "x" | "y",' in ours and ours.endswith("Bye<|end|><|start|>assistant")


def test_template_in_a_file_of_its_own(tmp_path):
    save(tmp_path, "from the config")
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    ours, theirs = both(tmp_path, CONVERSATIONS[1])
    assert ours == theirs
    assert "im_start" in ours


def test_special_tokens_map(tmp_path):
    save(tmp_path, "{{ bos_token }}{{ cls_token }}", bos_token=None)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "</s>", "cls_token": {"content": "Hi"}}))
    assert Tokenizer.open(tmp_path).chat([]) == "</s>Hi"


def test_bos_is_not_doubled(tmp_path):
    messages = [{"role": "user", "content": "Hi"}]
    save(tmp_path, "{{ bos_token }}Hi")
    assert Tokenizer.open(tmp_path).encode_chat(messages) == [1, 4]
    save(tmp_path)
    tokenizer = Tokenizer.open(tmp_path)
    assert not tokenizer.has_chat_template
    assert tokenizer.chat([*messages, {"role": "assistant", "content": None}]) == "User: Hi\nAssistant: \nAssistant:"
    assert tokenizer.encode_chat(messages)[0] == 1


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('no\\nway') }}", "no way"),
        ("{% if %}", "Expected"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "cannot hold"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_template_errors_are_one_line(tmp_path, template, says):
    tokenizer = save(tmp_path, template)
    with pytest.raises(BadRequest, match=says) as caught:
        tokenizer.chat([{"role": "user", "content": "Hi"}])
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("messages", [["Hi"], [{"content": "Hi"}], [{"role": "user", "content": {1, 2}}]])
def test_wrong_messages(tmp_path, messages):
    with pytest.raises(BadRequest):
        save(tmp_path, CHATML).chat(messages)


def test_template_file_that_is_no_text(tmp_path):
    save(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BrokenModel, match="chat_template"):
        Tokenizer.open(tmp_path)


def test_date_of_today(tmp_path):
    assert save(tmp_path, "{{ strftime_now('%Y') }}").chat([]) in (str(time.localtime().tm_year + d) for d in (0, -1))
