"""Write chat_templates.json: what transformers makes of messages by templates in the formats of published models.

python tests/server/make_chat_templates.py

Needs transformers. The templates were written for this test; each uses other parts of what transformers offers to templates.
"""

import json
import pathlib

from transformers.utils.chat_template_utils import render_jinja_template

TOKENS = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>")
TEMPLATES = {
    "chatml, with a default system message": """\
{% if messages[0].role != 'system' %}<|im_start|>system
You answer.<|im_end|>
{% endif %}
{% for message in messages %}
    {{- '<|im_start|>' ~ message['role'] + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "instructions in brackets, roles in turns": """\
{%- set start = 1 if messages[0]['role'] == 'system' else 0 %}
{%- set system = messages[0]['content'] | trim if start else '' %}
{%- for message in messages[start:] %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After a system message, user and assistant must take turns: ' ~ loop.index0) }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- bos_token + '[INST] ' + ('<<SYS>>\\n' ~ system ~ '\\n<</SYS>>\\n\\n' if loop.first and system else '') }}
        {{- message.content | trim ~ ' [/INST]' }}
    {%- else %}
        {{- ' ' ~ message.content.strip() ~ ' ' ~ eos_token }}
    {%- endif %}
{%- endfor %}""",
    "headers, with tools as JSON": """\
{{- bos_token }}
{%- if tools is defined and tools is not none %}
    {{- 'Tools: ' ~ tools | tojson(indent=2) ~ '\\n' }}
{%- elif not tools %}
    {{- {'none': '<é & "你">'} | tojson ~ {'b': 1, 'a': [true, none]} | tojson(sort_keys=true, separators=(',', ':')) }}
{%- endif %}
{% macro header(role) %}
<|start_header_id|>{{ role }}<|end_header_id|>

{% endmacro %}
{% for message in messages %}
    {{- header(message.role) ~ message.content }}<|eot_id|>
{%- endfor %}
{% if add_generation_prompt %}{{ header('assistant') }}{% endif %}""",
    "thoughts of earlier answers left out": """\
{%- set ns = namespace(last=-1, seen=[]) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and ns.last < 0 %}
        {%- set ns.last = messages | length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if '</think>' in content %}
        {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- if loop.index0 > ns.last %}{{ '<think>' ~ thought ~ '</think>' }}{% endif %}
    {%- endif %}
    {{- loop.index ~ ('!' if loop.index0 == ns.last else '.') ~ content ~ '\\n' }}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>' }}{% endif %}""",
    "marked words of the assistant": """\
{% for message in messages %}
{% if message.role == 'assistant' %}
{% generation %}
{{ message.content }}{{ eos_token }}
{% endgeneration %}
{% else %}
[{{ message.role | upper }}{{ ':' + message.name if message.name is defined }}] {{ message.content }}
{% endif %}
{% endfor %}
{{ mask_token }}{{ unknown }}|
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('/') }}""",
    "a date, which has no digits here": "{{ strftime_now('on a %% day') }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
    "keys by name and by subscript": """\
{%- for message in messages -%}
    {%- for key, value in message.items() | list | sort %}{{ key }}={{ value }};{% endfor -%}
    {{- message.get('absent', '-') ~ (message['absent'] is defined) ~ dict(a=1).a }}
{%- endfor -%}""",
    "what the sandbox refuses": "{{ messages.append(1) }}",
    "what the sandbox hides": "{{ messages.__class__.__mro__ }}",
}
CONVERSATIONS = {
    "one": [dict(role="user", content="Hello, <b>world</b> & 'you' \"é你😀\"!")],
    "with a system message": [
        dict(role="system", content="Be brief.\n"),
        dict(role="user", content=" Hi "),
        dict(role="assistant", content="Hello."),
        dict(role="user", content="And now?\r\nNow."),
    ],
    "thoughts": [
        dict(role="user", content="a"),
        dict(role="assistant", content="<think>\nhm\n</think>\n\nb"),
        dict(role="user", content="c"),
        dict(role="assistant", content="<think>so</think>d"),
    ],
    "out of turn": [dict(role="assistant", content="x"), dict(role="assistant", content="{{ y }}")],
    "a tool": [
        dict(role="user", content="q"),
        dict(role="tool", content="42", name="f"),
        dict(role="user", content="r"),
    ],
}
VARIABLES = {
    "none": {},
    "thinking": dict(enable_thinking=False),
    "tools": dict(tools=[dict(type="function", function=dict(name="f", description="<x> é"))]),
}


def main():
    cases = []
    for name, template in TEMPLATES.items():
        for chat, messages in CONVERSATIONS.items():
            for given, variables in VARIABLES.items():
                case = dict(name=f"{name}; {chat}; {given}", template=template, messages=messages, variables=variables)
                options = dict(chat_template=template, add_generation_prompt=True) | TOKENS | variables
                try:
                    case["text"] = render_jinja_template([messages], **options)[0][0]
                except Exception as error:  # templates raise of several kinds
                    case["error"] = str(error)
                cases.append(case)
    path = pathlib.Path(__file__).with_name("chat_templates.json")
    path.write_text(json.dumps(dict(tokens=TOKENS, cases=cases), ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
