"""Chat templates as Jinja renders them with Transformers' settings."""
import itertools
import json

import pytest

jinja2 = pytest.importorskip("jinja2")

from data_tool import ask  # noqa: E402

CHATML = """{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

DEFAULT_SYSTEM = """{% for message in messages %}
{% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}
{% endif %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' + '\n' }}
{% endfor %}
    {% if add_generation_prompt %}
<|im_start|>assistant
    {% endif %}
"""

# The shape of Qwen3's: tools that are not there, thoughts of earlier turns taken out.
THINKING = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<tools>{\"name\": 1}<|im_end|>\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""

CONTENTS = {"system": "Be brief.\n", "user": "  1+1?\n", "assistant": "<think>\nhm\n</think>\n\n2",
            "tool": "{\"a\": \u00e9}"}


def conversations():
    for n in range(1, 5):
        for roles in itertools.product(CONTENTS, repeat=n):
            yield [{"role": role, "content": CONTENTS[role]} for role in roles]


@pytest.mark.parametrize("source", [CHATML, DEFAULT_SYSTEM, THINKING])
@pytest.mark.parametrize("in_config", [False, True])
def test_renders_as_jinja_does(source, in_config, tmp_path):
    if in_config:
        config = {"chat_template": source, "eos_token": {"content": "</s>"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    else:
        (tmp_path / "chat_template.jinja").write_text(source)
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    theirs = environment.from_string(source)
    requests = [{"op": "render", "messages": messages, "generate": generate}
                for messages in conversations() for generate in (True, False)]
    ours = ask([{"op": "template", "folder": str(tmp_path)}] + requests)
    assert ours[0] is True
    for request, text in zip(requests, ours[1:]):
        assert text == theirs.render(messages=request["messages"],
                                     add_generation_prompt=request["generate"])


def test_a_folder_without_a_template_has_none(tmp_path):
    assert ask([{"op": "template", "folder": str(tmp_path)}]) == [False]
