"""Chat templates of many models, written from their public descriptions, with tokenizers that have their special tokens.

The assistant's turns stand in `{% generation %}`, from which Transformers computes the masks that tests compare with.
"""

from dataclasses import dataclass
from functools import cache

SENTENCES = [
    "The user asks a tool, and the assistant answers: system, tool_call, tool_response, function, name, arguments.",
    "I was singing in the rain, and it was good!\n\nYes. 3 + 4 = 7, 한국어, a café and 😀.",
    '{"name": "look_up", "arguments": {"word": "rain", "limit": 3}}',
] * 20


@dataclass(frozen=True)
class Model:
    """A template with its tokens."""

    template: str
    special: tuple[str, ...]
    """Special tokens."""
    eos: str
    added: tuple[str, ...] = ()
    """Added tokens that are not special."""
    bos: str | None = None
    swallows: bool = False
    """True if special tokens swallow the white space after them."""
    tools: bool = False
    several: bool = True
    """True if a turn may have several calls."""
    system: bool = True
    """True if there may be a system message."""
    thinks: bool = False
    """True if the template writes thinking."""
    kwargs: tuple[tuple[str, object], ...] = ()


def speak(header):
    """The end of a template: the generation prompt."""
    return "{%- if add_generation_prompt %}{{ '" + header + "' }}{%- endif %}"


CHATML = Model(
    """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
{%- else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{%- endfor %}"""
    + speak("<|im_start|>assistant\n"),
    ("<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
)

HERMES_HEAD = """{%- if tools %}{{ '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
{{- '# Tools\n<tools>' }}{%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}{{ '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- else %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"""
HERMES_CALLS = """{%- for call in m.tool_calls %}
{%- if not loop.first or m.content %}{{ '\n' }}{% endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}{% endfor %}"""
HERMES_TOOL = """{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"""
TOOL_TOKENS = ("<tool_call>", "</tool_call>")

QWEN25 = Model(
    HERMES_HEAD
    + """{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}{{ m.content or '' }}"""
    + HERMES_CALLS
    + """{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
{%- elif m.role == 'tool' %}"""
    + HERMES_TOOL
    + "{%- endif %}{%- endfor %}"
    + speak("<|im_start|>assistant\n"),
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
    TOOL_TOKENS,
    tools=True,
)

QWEN3 = Model(
    HERMES_HEAD
    + """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{%- set thinking = m.reasoning_content or '' %}{{ '<|im_start|>assistant\n' }}{% generation %}
{%- if loop.index0 > ns.last and (loop.last or thinking) %}
{{- '<think>\n' + thinking.strip('\n') + '\n</think>\n\n' }}{% endif %}{{ (m.content or '').lstrip('\n') }}"""
    + HERMES_CALLS
    + """{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
{%- elif m.role == 'tool' %}"""
    + HERMES_TOOL
    + "{%- endif %}{%- endfor %}"
    + speak("<|im_start|>assistant\n' + ('<think>\n\n</think>\n\n' if enable_thinking is false else '') + '"),
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
    (*TOOL_TOKENS, "<think>", "</think>", "<tool_response>", "</tool_response>"),
    tools=True,
    thinks=True,
)

QWEN_CODER = Model(
    HERMES_HEAD
    + """{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}{{ m.content or '' }}
{%- for call in m.tool_calls %}{{ '<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<parameter=' + key + '>\n' }}{{ value if value is string else value | tojson }}{{ '\n</parameter>\n' }}{% endfor %}
{{- '</function>\n</tool_call>' }}{% endfor %}{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
{%- elif m.role == 'tool' %}"""
    + HERMES_TOOL
    + "{%- endif %}{%- endfor %}"
    + speak("<|im_start|>assistant\n"),
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
    TOOL_TOKENS,
    tools=True,
)

LLAMA_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
LLAMA3 = Model(
    """{{- bos_token }}{%- for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content | trim + '<|eot_id|>' }}{% endgeneration %}
{%- else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}{%- endfor %}"""
    + speak("<|start_header_id|>assistant<|end_header_id|>\n\n"),
    LLAMA_TOKENS,
    "<|eot_id|>",
    bos="<|begin_of_text|>",
)

LLAMA31 = Model(
    """{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}{%- if tools is not none %}{{ 'Environment: ipython\n' }}{% endif %}
{{- 'Cutting Knowledge Date: December 2023\n\n' + system + '<|eot_id|>' }}
{%- if tools is not none and messages %}
{%- set first = messages[0].content | trim %}{% set messages = messages[1:] %}
{{- '<|start_header_id|>user<|end_header_id|>\n\nFunctions:\n\n' }}
{%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\n\n' }}{% endfor %}{{ first + '<|eot_id|>' }}{% endif %}
{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('only one tool call at once') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% generation %}{{ '{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{ '}<|eot_id|>' }}{% endgeneration %}
{%- elif m.role == 'tool' or m.role == 'ipython' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{{ m.content | tojson }}{{ '<|eot_id|>' }}
{%- elif m.role == 'assistant' %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% generation %}{{ m.content | trim + '<|eot_id|>' }}{% endgeneration %}
{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}{# <|eom_id|> ends calls of built-in tools #}"""
    + speak("<|start_header_id|>assistant<|end_header_id|>\n\n"),
    (*LLAMA_TOKENS, "<|eom_id|>", "<|python_tag|>"),
    "<|eot_id|>",
    bos="<|begin_of_text|>",
    tools=True,
    several=False,
)

MISTRAL = Model(
    """{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}{% endif %}
{%- set ns = namespace(turn=0, last=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate user/assistant') }}{% endif %}
{%- set ns.turn = ns.turn + 1 %}{% endif %}{% endfor %}
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools is not none and loop.index0 == ns.last %}{{ '[AVAILABLE_TOOLS] ' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + ((system + '\n\n') if loop.last and system is defined else '') + m.content + '[/INST]' }}
{%- elif m.tool_calls %}{% generation %}{{ '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}{{ raise_exception('ids of tool calls have 9 characters') }}{% endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}
{{- ', "id": "' + call.id + '"}' }}{{ '' if loop.last else ', ' }}{% endfor %}{{ ']' + eos_token }}{% endgeneration %}
{%- elif m.role == 'assistant' %}{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}{{ raise_exception('ids of tool calls have 9 characters') }}{% endif %}
{{- '[TOOL_RESULTS] {"content": ' }}{{ m.content | tojson }}{{ ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}{%- endfor %}""",
    (
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[TOOL_CALLS]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
    ),
    "</s>",
    bos="<s>",
    tools=True,
    system=False,
)

GEMMA = Model(
    """{{- bos_token }}{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user/assistant') }}{% endif %}
{%- if m.role == 'assistant' %}{{ '<start_of_turn>model\n' }}{% generation %}{{ m.content | trim + '<end_of_turn>' }}{% endgeneration %}{{ '\n' }}
{%- else %}{{ '<start_of_turn>user\n' + m.content | trim + '<end_of_turn>\n' }}{% endif %}{%- endfor %}"""
    + speak("<start_of_turn>model\n"),
    ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "<eos>",
    bos="<bos>",
    system=False,
)

GEMMA_CALLS = Model(
    """{{- bos_token }}
{%- if tools %}{{ '<start_of_turn>developer\n' }}{% for tool in tools %}
{{- '<start_function_declaration>declaration:' + tool.function.name + '{}<end_function_declaration>' }}{% endfor %}{{ '<end_of_turn>\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<start_function_response>response:' + m.name + '{value:<escape>' + m.content + '<escape>}<end_function_response>' }}
{%- else %}
{%- if m.role == 'assistant' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{ '<start_of_turn>model\n' }}{% endif %}{% generation %}{{ (m.content or '') | trim }}
{%- for call in m.tool_calls %}{{ '<start_function_call>call:' + call.function.name + '{' }}
{%- for key, value in call.function.arguments.items() %}{{ key + ':' }}{{ ('<escape>' + value + '<escape>') if value is string else value | tojson }}
{{- '' if loop.last else ',' }}{% endfor %}{{ '}<end_function_call>' }}{% endfor %}
{{- '' if m.tool_calls else '<end_of_turn>' }}{% endgeneration %}{{ '' if m.tool_calls else '\n' }}
{%- else %}{{ '<start_of_turn>' + m.role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<start_of_turn>model\n' }}{% endif %}""",
    (
        "<bos>",
        "<eos>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<start_function_declaration>",
        "<end_function_declaration>",
        "<start_function_call>",
        "<end_function_call>",
        "<start_function_response>",
        "<end_function_response>",
        "<escape>",
    ),
    "<eos>",
    bos="<bos>",
    tools=True,
)

PHI3 = Model(
    """{%- for m in messages %}{{ '<|' + m.role + '|>\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}{{ '\n' }}
{%- else %}{{ m.content + '<|end|>\n' }}{% endif %}{%- endfor %}"""
    + speak("<|assistant|>\n"),
    ("<s>", "<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"),
    "<|endoftext|>",
    swallows=True,
)

PHI4_MINI = Model(
    """{%- for m in messages %}
{%- if m.role == 'system' %}{{ '<|system|>' + m.content }}{% if tools %}{{ '<|tool|>' }}{{ tools | tojson }}{{ '<|/tool|>' }}{% endif %}{{ '<|end|>' }}
{%- else %}
{%- if loop.first and tools %}{{ '<|system|><|tool|>' }}{{ tools | tojson }}{{ '<|/tool|><|end|>' }}{% endif %}
{%- if m.role == 'assistant' %}{{ '<|assistant|>' }}{% generation %}{{ m.content or '' }}
{%- if m.tool_calls %}{{ '<|tool_call|>[' }}{% for call in m.tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}{{ '}' if loop.last else '}, ' }}{% endfor %}
{{- ']<|/tool_call|>' }}{% endif %}{{ '<|end|>' }}{% endgeneration %}
{%- elif m.role == 'tool' %}{{ '<|tool_response|>' + m.content + '<|end|>' }}
{%- else %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endif %}{% endif %}{%- endfor %}"""
    + speak("<|assistant|>"),
    (
        "<|endoftext|>",
        "<|end|>",
        "<|user|>",
        "<|assistant|>",
        "<|system|>",
        "<|tool|>",
        "<|/tool|>",
        "<|tool_call|>",
        "<|/tool_call|>",
        "<|tool_response|>",
    ),
    "<|end|>",
    tools=True,
)

ZEPHYR = Model(
    """{%- for m in messages %}{{ '<|' + m.role + '|>\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}{{ '\n' }}
{%- else %}{{ m.content + eos_token + '\n' }}{% endif %}{%- endfor %}"""
    + speak("<|assistant|>\n"),
    ("<s>", "</s>"),
    "</s>",
)

DEEPSEEK = Model(
    """{{- bos_token }}{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}
{%- if tools %}{{ '\n\n## Tools\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content + '<｜Assistant｜>' }}
{%- elif m.role == 'assistant' %}{% generation %}{{ m.content or '' }}
{%- if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}{% for call in m.tool_calls %}{{ '' if loop.first else '\n' }}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\n```json\n' + call.function.arguments + '\n```<｜tool▁call▁end｜>' }}
{%- endfor %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}{{ '<｜end▁of▁sentence｜>' }}{% endgeneration %}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<｜tool▁outputs▁begin｜>' }}{% endif %}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}{% endif %}{%- endfor %}""",
    (
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁outputs▁begin｜>",
        "<｜tool▁outputs▁end｜>",
        "<｜tool▁output▁begin｜>",
        "<｜tool▁output▁end｜>",
    ),
    "<｜end▁of▁sentence｜>",
    bos="<｜begin▁of▁sentence｜>",
    tools=True,
)

GRANITE = Model(
    """{%- if tools %}{{ '<|start_of_role|>tools<|end_of_role|>' }}{{ tools | tojson(indent=4) }}{{ '<|end_of_text|>\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% generation %}{{ m.content or '' }}
{%- if m.tool_calls %}{{ '<|tool_call|>[' }}{% for call in m.tool_calls %}
{{- '{"arguments": ' }}{{ call.function.arguments | tojson }}{{ ', "name": "' + call.function.name + ('"}' if loop.last else '"}, ') }}{% endfor %}
{{- ']' }}{% endif %}{{ '<|end_of_text|>' }}{% endgeneration %}{{ '\n' }}
{%- else %}{{ '<|start_of_role|>' + ('tool_response' if m.role == 'tool' else m.role) + '<|end_of_role|>' + m.content + '<|end_of_text|>\n' }}{% endif %}
{%- endfor %}"""
    + speak("<|start_of_role|>assistant<|end_of_role|>"),
    ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"),
    "<|end_of_text|>",
    tools=True,
)

COMMAND_R = Model(
    """{{- bos_token }}{%- if tools %}{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>## Available Tools\n' }}{% for tool in tools %}
{{- tool | tojson }}{{ '\n' }}{% endfor %}{{ '<|END_OF_TURN_TOKEN|>' }}{% endif %}
{%- for m in messages %}{{ '<|START_OF_TURN_TOKEN|>' }}
{%- if m.role == 'assistant' %}{{ '<|CHATBOT_TOKEN|>' }}{% generation %}{{ m.content or '' }}
{%- if m.tool_calls %}{{ 'Action: ```json\n[' }}{% for call in m.tool_calls %}
{{- '{"tool_name": "' + call.function.name + '", "parameters": ' }}{{ call.function.arguments | tojson }}{{ '}' if loop.last else '},\n' }}{% endfor %}
{{- ']\n```' }}{% endif %}{{ '<|END_OF_TURN_TOKEN|>' }}{% endgeneration %}
{%- elif m.role == 'tool' %}{{ '<|SYSTEM_TOKEN|><results>\n' + m.content + '\n</results><|END_OF_TURN_TOKEN|>' }}
{%- else %}{{ ('<|SYSTEM_TOKEN|>' if m.role == 'system' else '<|USER_TOKEN|>') + m.content + '<|END_OF_TURN_TOKEN|>' }}{% endif %}{%- endfor %}"""
    + speak("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"),
    (
        "<BOS_TOKEN>",
        "<|START_OF_TURN_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|USER_TOKEN|>",
        "<|CHATBOT_TOKEN|>",
        "<|SYSTEM_TOKEN|>",
    ),
    "<|END_OF_TURN_TOKEN|>",
    bos="<BOS_TOKEN>",
    tools=True,
)

GLM = Model(
    """{{- '[gMASK]<sop>' }}{%- if tools %}{{ '<|system|>\n# Tools\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|assistant|>\n' }}{% generation %}{{ m.content or '' }}
{%- for call in m.tool_calls %}{{ '<tool_call>' + call.function.name + '\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<arg_key>' + key + '</arg_key>\n<arg_value>' }}{{ value if value is string else value | tojson }}{{ '</arg_value>\n' }}{% endfor %}
{{- '</tool_call>' }}{% endfor %}{% endgeneration %}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- else %}{{ '<|' + m.role + '|>\n' + m.content }}{% endif %}{%- endfor %}"""
    + speak("<|assistant|>\n"),
    ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    "<|user|>",
    (*TOOL_TOKENS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_response>", "</tool_response>"),
    tools=True,
)

VICUNA = Model(
    """{%- for m in messages %}
{%- if m.role == 'user' %}{{ 'USER: ' + m.content + ' ASSISTANT:' }}
{%- elif m.role == 'assistant' %}{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}
{%- else %}{{ m.content + '\n\n' }}{% endif %}{%- endfor %}""",
    ("<s>", "</s>"),
    "</s>",
)

MODELS = {
    "ChatML": CHATML,
    "Qwen2.5": QWEN25,
    "Qwen3": QWEN3,
    "Qwen3-Coder": QWEN_CODER,
    "Llama 3": LLAMA3,
    "Llama 3.1": LLAMA31,
    "Mistral": MISTRAL,
    "Gemma 2": GEMMA,
    "FunctionGemma": GEMMA_CALLS,
    "Phi-3": PHI3,
    "Phi-4-mini": PHI4_MINI,
    "Zephyr": ZEPHYR,
    "DeepSeek-V3": DEEPSEEK,
    "Granite 3": GRANITE,
    "Command R": COMMAND_R,
    "GLM-4.5": GLM,
    "Vicuna": VICUNA,
}


@cache
def chat_tokenizer(name):
    """A byte-level tokenizer with the special tokens and the template of a model."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    model = MODELS[name]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(SENTENCES, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False, rstrip=model.swallows) for token in model.special]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in model.added])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=model.eos, bos_token=model.bos)
    made.chat_template = model.template
    return made
