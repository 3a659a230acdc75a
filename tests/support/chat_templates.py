"""Small chat templates in the manner of models that call tools."""

# Tools as JSON lines in the system turn, calls between tags, answers as user turns, thinking that can be switched off.
HERMES = """{%- set opening = messages[0].content if messages[0].role == 'system' else 'Be helpful.' -%}
<|im_start|>system
{{ opening }}
{%- if tools %}

Call functions as <tool_call>{"name": ..., "arguments": ...}</tool_call>. They are:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
{%- endif %}<|im_end|>
{% for message in messages if message.role != 'system' %}
{%- if message.role == 'tool' %}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}
<|im_start|>{{ message.role }}
{%- if message.reasoning_content is defined and loop.last %}
<think>{{ message.reasoning_content }}</think>
{%- endif %}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}
{%- endif %}"""

# Tools as indented JSON in the first user turn, one call a turn, answers in a role of their own, the date.
LLAMA3 = """{{- bos_token }}
{%- if date_string is not defined %}{% set date_string = '26 Jul 2024' %}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
    {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
{%- elif message.tool_calls %}
    {%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
    {%- set call = message.tool_calls[0].function %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
    {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
{%- else %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {%- if loop.first %}{{ 'Today: ' + date_string + '\\n' }}{% endif %}
    {%- if tools and loop.first %}
        {{- 'Answer with {"name": function, "parameters": arguments} to call one of:\\n' }}
        {%- for tool in tools %}{{ tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}
    {%- endif %}
    {{- message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

# Always thinks: the prompt opens the tag.
THINKER = """{% for message in messages %}<|{{ message.role }}|>{{ message.content.split('</think>')[-1] }}
{% endfor %}{% if add_generation_prompt %}<|assistant|><think>
{% endif %}"""

PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"

_TURNS = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"

# One a family: tools as lines of JSON, and a line that shows how calls are written.
QWEN3_CODER = _TOOLS + "Write <tool_call><function=f><parameter=a>1</parameter></function></tool_call>.\n" + _TURNS
GLM = (
    _TOOLS
    + "Write <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>.\n"
    + _TURNS
    + "<think></think>"
)
LLAMA4 = _TOOLS + '<|header_start|>Write {"name": f, "parameters": arguments}.\n' + _TURNS
MISTRAL = _TOOLS + '[AVAILABLE_TOOLS][TOOL_CALLS][{"name": f, "arguments": {}}]\n' + _TURNS
MAGISTRAL = "Think between [THINK] and [/THINK].\n" + MISTRAL
DEEPSEEK = (
    _TOOLS
    + "Write <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f and arguments.\n"
    + "{% for message in messages %}{{ message.content.split('</think>') | last }}{% endfor %}"
)
DEEPSEEK_V32 = (
    _TOOLS
    + 'Write <｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">1.\n'
    + "{% for message in messages %}{{ message.content.split('</think>') | last }}{% endfor %}"
)
MINIMAX = (
    _TOOLS
    + '<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke></minimax:tool_call>\n'
    + "{% for message in messages %}{{ message.content.split('</think>') | last }}{% endfor %}<think>\n"
)
# Calls as the model writes them, in the manner of the template of Gemma 4: macros that call themselves, thoughts that
# are left out of the history but for the last turn's.
GEMMA4 = """{%- macro value(of) -%}
{%- if of is string %}<|"|>{{ of }}<|"|>{% elif of is boolean %}{{ 'true' if of else 'false' }}
{%- elif of is mapping -%}
{ {%- for key, item in of | dictsort %}{{ key }}:{{ value(item) }}{{ ',' if not loop.last }}{% endfor -%} }
{%- elif of is sequence %}[{% for item in of %}{{ value(item) }}{{ ',' if not loop.last }}{% endfor %}]
{%- else %}{{ of }}{% endif %}
{%- endmacro -%}
{{- bos_token -}}
{%- if enable_thinking is defined and enable_thinking %}<|think|>{% endif %}
{%- for tool in tools or [] %}<|tool>declaration:{{ value(tool['function']) }}<tool|>{% endfor %}
{%- set seen = namespace(user=-1) %}
{%- for message in messages if message['role'] == 'user' %}{% set seen.user = loop.index0 %}{% endfor %}
{%- for message in messages %}
{%- if message['role'] == 'tool' %}<|tool_response>response:{value:{{ value(message['content']) }}}<tool_response|>
{%- else %}<|turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}
{% set thinking = message.get('reasoning') or message.get('reasoning_content') %}
{%- if thinking and loop.last %}<|channel>thought
{{ thinking }}
<channel|>{% endif %}
{%- for call in message['tool_calls'] or [] -%}
<|tool_call>call:{{ call['function']['name'] }}{{ value(call['function']['arguments']) }}<tool_call|>
{%- endfor %}
{{- message['content'] | trim }}<turn|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|turn>model
{% endif %}"""
GPT_OSS = _TOOLS + "{{ '<|channel|>analysis, commentary or final<|message|>' }}\n" + _TURNS + "<|start|>assistant"
