"""Chat templates: what they render, and what the sandbox refuses."""

import json
import re

import pytest

from transformer.chat import ChatError, ChatTemplate, load_template

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
Be kind<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
# As Llama 3.1 writes it: blocks on lines of their own, BOS from the tokenizer, a date.
HEADERS = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%Y") %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {{- raise_exception("no tools") }}
    {%- endif %}
    {{- "<|start_header_id|>" + message['role'] + "<|end_header_id|>\\n\\n" }}
    {{- message['content'] | trim + "<|eot_id|>" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
USER = [{"role": "user", "content": " Hi <b> é "}]


def test_a_conversation_is_written_as_the_template_says():
    template = ChatTemplate(CHATML)
    system = "<|im_start|>system\nBe kind<|im_end|>\n"
    assert template.render(USER) == f"{system}<|im_start|>user\n Hi <b> é <|im_end|>\n<|im_start|>assistant\n"
    assert template.render(USER, add_generation_prompt=False) == f"{system}<|im_start|>user\n Hi <b> é <|im_end|>\n"
    turns = [{"role": "system", "content": "S"}, *USER, {"role": "assistant", "content": "A"}, *USER]
    assert template.render(turns).count("<|im_start|>") == 5


def test_tokens_and_whitespace_are_as_in_transformers():
    template = ChatTemplate(HEADERS, {"bos_token": "<s>"})
    user = "<|start_header_id|>user<|end_header_id|>\n\nHi <b> é<|eot_id|>"
    assert template.render(USER) == f"<s>{user}<|start_header_id|>assistant<|end_header_id|>\n\n"
    with pytest.raises(ChatError, match="no tools"):
        template.render([{"role": "tool", "content": ""}])


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": " Hi <b> é "}]'),
        ("{{ {'a': 1} | tojson(indent=1) }}", '{\n "a": 1\n}'),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
        ("{% generation %}said{% endgeneration %}", "said"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ tools is none }}{{ missing is defined }}{{ eos_token }}", "TrueFalse"),
        ("{{ messages[0].get('role') }}{{ 'a,b'.split(',')[1] }}", "userb"),
    ],
)
def test_what_templates_use_works(source, text):
    assert ChatTemplate(source).render(USER) == text
    assert re.fullmatch(r"\d{4}", ChatTemplate("{{ strftime_now('%Y') }}").render(USER))


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages['__class__'] }}{{ messages|attr('__class__') }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.append(1) }}",
        "{% set _ = messages[0].update(role='x') %}",
        "{{ self.__init__ }}",
        "{{ range(10000000) | list }}",
    ],
)
def test_a_hostile_template_is_refused_in_one_line(source):
    with pytest.raises(ChatError) as refused:
        ChatTemplate(source, name="t.jinja").render(USER)
    assert str(refused.value).startswith("t.jinja: ") and "\n" not in str(refused.value)


def test_mistakes_are_one_line():
    with pytest.raises(ChatError, match=r"t\.jinja: line 2: "):
        ChatTemplate("ok\n{% if %}", name="t.jinja")
    with pytest.raises(ChatError, match=r"t\.jinja: .*undefined"):
        ChatTemplate("{{ nothing.of.this }}", name="t.jinja").render(USER)
    with pytest.raises(ChatError, match=r"t\.jinja: "):
        ChatTemplate("{{ 1 / 0 }}", name="t.jinja").render(USER)


def test_a_checkpoint_keeps_its_template_in_either_file(tmp_path):
    with pytest.raises(ChatError, match="has no chat template"):
        load_template(tmp_path)
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}2"}]
    for value, text in ((templates, "<s>2"), ("{{ eos_token }}1", "</s>1")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": value}))
        assert load_template(tmp_path).render(USER) == text
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}3")
    assert load_template(tmp_path).render(USER) == "<s>3"
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ChatError, match="can't be read"):
        load_template(tmp_path)
