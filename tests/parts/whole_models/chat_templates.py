"""Chat templates in the forms of the usual families of models, written for the tests."""

from __future__ import annotations

LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}
{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}{% else %}
{% set rest = messages %}{% set system = '' %}{% endif %}
{% for m in rest %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('user and assistant take turns') }}{% endif %}
{%- if m['role'] == 'user' %}
{{- bos_token + '[INST] ' + (system if loop.first else '') + m['content'].strip() + ' [/INST]' }}
{%- else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}
{%- endfor %}"""

LLAMA3 = """\
{{- bos_token }}
{%- set date = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start|>system<|end|>\\n\\nToday Date: ' + date + '\\n\\n' + system + '<|eot|>' }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}"""

MISTRAL = """\
{%- set ns = namespace(index=0, system='') %}
{%- for m in messages %}
    {%- if m.role == 'system' %}{% set ns.system = m.content + '\\n\\n' %}{% continue %}{% endif %}
    {%- if loop.last and tools is not none %}{{ '[AVAILABLE_TOOLS]' }}{% endif %}
    {%- if m.role == 'user' %}{{ '[INST] ' + ns.system + m.content + '[/INST]' }}
    {%- else %}{{ ' ' ~ m.content ~ eos_token }}{% endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}"""

CHATML = """\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

QWEN3 = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}{{ tools | tojson }}{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == 'user' and message.content is string %}
        {%- set ns.last = index %}{%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set thought = '' %}
    {%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
    {%- elif '</think>' in message.content %}
        {%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
    {%- endif %}
    {%- set said = message.content.split('</think>')[-1].lstrip('\\n') %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if loop.index0 > ns.last or thought %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- said + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>' }}{%- endif %}
{%- endif %}"""

GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] + '\\n\\n' -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set prefix = '' -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] if item['type'] == 'text' -%}{{ item['text'] | trim }}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

PHI3 = """\
{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}
{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'user' %}
{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'assistant' %}
{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

VICUNA = """\
{%- macro turn(who, text, end='') -%}{{ who|upper }}: {{ text|trim }}{{ end }}{%- endmacro -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{ m.content }}{{ ' ' }}
{%- else -%}{{ turn(m.role, m.content, eos_token if m.role == 'assistant' else ' ') }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}ASSISTANT:{%- endif -%}"""

DEEPSEEK = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% set ns = namespace(is_first=false, system='', **{'tools': []}) %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{% set ns.system = message['content'] %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{%- set ns.is_first = true -%}{{'<|User|>' + message['content']}}
{%- endif %}{%- if message['role'] == 'assistant' and message['content'] is not none %}
{% set content = message['content'].split('</think>')[-1] %}
{{- '<|Assistant|>' + content + eos_token }}{%- endif %}{%- endfor -%}
{% if add_generation_prompt and ns.is_first %}{{'<|Assistant|><think>\\n'}}{% endif %}"""

COMMAND_R = """\
{{ bos_token }}{% if documents is defined and documents %}{{ raise_exception('no') }}{% endif %}
{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}
{% set system_message = false %}{% endif %}{% if system_message != false %}
{{ '<|START|><|SYSTEM|>' + system_message + '<|STOP|>' }}{% endif %}
{% for message in loop_messages %}{% set content = message['content'] %}
{% if message['role'] == 'user' %}{{ '<|START|><|USER|>' + content.strip() + '<|STOP|>' }}
{% elif message['role'] == 'assistant' %}
{% generation %}{{ '<|START|><|CHATBOT|>' + content.strip() + '<|STOP|>' }}{% endgeneration %}
{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|START|><|CHATBOT|>' }}{% endif %}"""

GRANITE = """\
{%- set tokens = dict(open='<|start|>', close='<|end|>') %}
{%- for message in messages %}
    {%- for key, value in message.items() if key == 'role' %}
        {{- tokens.open ~ value ~ tokens['close'] }}
    {%- endfor %}
    {{- message.get('content', '') ~ eos_token ~ '\\n' }}
    {%- if message.tool_calls %}
        {{- message.tool_calls | map(attribute='function') | list | tojson(indent=2) ~ '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- tokens.open ~ 'assistant' ~ tokens.close }}{%- endif %}"""

SMOLLM = """\
{% for message in messages %}
{% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\\nYou are a helpful AI assistant<|im_end|>\\n' }}
{% endif %}
{{'<|im_start|>' + message['role'] + '\\n'}}
{%- if message.role == 'assistant' %}{% generation %}
{{ message['content'] + '<|im_end|>' }}
{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

FALCON = """\
{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}
{{ {'user': 'User', 'assistant': 'Falcon', 'system': 'System'}[message.role] }}: \
{{ message.content | replace('\\r\\n', '\\n') }}{% endfor %}
{% if add_generation_prompt %}{{ '\\nFalcon:' }}{% endif %}"""

OLMO = """\
{{ eos_token }}{% for message in messages %}
{% if message['role'] == 'assistant' and not loop.last %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token + '\\n' }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% else %}{{ '<|%s|>\\n%s\\n' % (message['role'], message['content']) }}
{% endif %}
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}"""

STARCHAT = """\
{#- every role has its token -#}
{%- for message in messages %}
  {%- if message['role'] not in ['system', 'user', 'assistant'] %}
    {{- raise_exception('unknown role ' ~ message['role']) }}
  {%- endif %}
<|{{ message['role'] }}|>
    {% if 'tool_calls' in message %}
      {{ message.tool_calls }}
    {% endif %}
{{ message['content'] + '<|end|>' }}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>
{% endif %}"""

TEMPLATES = {
    name.lower(): text for name, text in globals().items() if name.isupper() and name[0] != "_"
}
"""The templates, by the family whose form they have."""
