"""Small chat templates that speak of tools and reasoning as those of public models do."""

HERMES = """\
{%- for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
THINKING = """\
{%- for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}
{%- if add_generation_prompt %}<assistant>
{%- if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n
{%- elif opened is defined and opened %}<think>\n{% endif %}{% endif %}
{#- calls: <tool_call>{"name": ..., "arguments": ...}</tool_call> in tool_calls #}"""
MISTRAL = """\
{%- if tools %}[{{ tools | length }}]{% endif %}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}
{%- if call.id | length != 9 %}{{ raise_exception("ids have 9 characters") }}{% endif -%}
[TOOL_CALLS][{{ call.function | tojson }} {{ call.id }}]{% endfor %}
{%- if message.tool_call_id is defined %}({{ message.tool_call_id }}){% endif %}
{% endfor %}"""
KIMI = """\
{%- for message in messages %}<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}<|tool_calls_section_begin|>{{ call.id }}{% endfor %}
{%- if message.tool_call_id is defined %}({{ message.tool_call_id }}){% endif %}
{% endfor %}{{ (tools or []) | length }}"""
HARMONY = """\
{%- for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endfor %}{{ (tools or []) | length }}{# tool_calls #}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|> #}"""
