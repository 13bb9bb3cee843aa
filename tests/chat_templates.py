"""Chat templates in our own words, after what real models ship."""

from __future__ import annotations

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(calls=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is defined and message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {% generation %}{{- message.content }}{% endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {%- set ns.calls = ns.calls + 1 %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA3 = """\
{% set loop_messages = messages %}
{% for message in loop_messages %}
  {% set content = '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim %}
  {% if loop.index0 == 0 %}
    {% set content = bos_token + content %}
  {% endif %}
{{ content + '<|eot|>' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\\n\\n' }}{% endif %}
"""
MISTRAL = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.last and system is defined %}
            {{- '[INST] ' + system + '\\n\\n' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + '[/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] + eos_token }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}
"""
GEMMA2 = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {{- raise_exception('System role not supported') }}
{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif -%}
"""
PARTS = """\
{%- for message in messages -%}
<{{ message.role }}>
{%- if message.content is string %}{{ message.content }}{% else -%}
{%- for part in message.content %}[{{ part.type }}:{{ part.text }}]{% endfor %}
{%- endif %}
{%- endfor -%}
{%- if add_generation_prompt %}<assistant>{% endif -%}
"""
CONTROLS = """\
{% for message in messages %}{% if message.role == 'tool' %}{% continue %}{% endif %}
{{ loop.index }}:{{ message.content | tojson(indent=2) }}
{%- if loop.index > 2 %}{% break %}{% endif %}
{% endfor %}{{ dict(a=1, b=2) | tojson }} {{ documents | tojson }} {{ strftime_now('%Y') }}
{%- macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice(eos_token) }}<é&"'>{{ '<é&>' | tojson }}
"""
TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma2": GEMMA2,
    "parts": PARTS,
    "controls": CONTROLS,
}
