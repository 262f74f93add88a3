"""Chat templates: the Jinja program in which a published checkpoint says how its conversations are written.

The template is foreign code, so it runs in a sandbox that can neither change nor look into Python objects
(huggingface/transformers, utils/chat_template_utils.py, defines what it may call).
"""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError


class Message(TypedDict):
    """One turn: the role is "system", "user" or "assistant"."""

    role: str
    content: str


class ChatError(ValueError):
    """A chat template is missing, wrong, or asks for what it may not have."""


class _Sandbox(ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        # Jinja itself would go on with an undefined value, which prints as nothing.
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe")


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; rendered, it is its content."""

    tags = {"generation"}  # noqa: RUF012 (declared by Jinja, which reads it from the class)

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template.

    Args:
      tokens: the special tokens that it may print: bos_token, eos_token and so on.

    Raises:
      ChatError: its syntax is wrong.
    """

    def __init__(self, source: str, tokens: dict[str, str] | None = None, name: str = "chat template"):
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise, strftime_now=_strftime_now)
        self._name, self._tokens = name, tokens or {}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatError(f"{name}: line {error.lineno}: {error.message}") from None

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The conversation as the text that the model reads, up to where the assistant answers.

        Raises:
          ChatError: the template refuses the conversation, fails, or asks for what the sandbox doesn't give.
        """
        values = {**self._tokens, "messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(tools=None, documents=None, **values)
        except SecurityError as error:
            raise ChatError(f"{self._name}: refused: {error}") from None
        except Exception as error:  # foreign code may fail in any way
            raise ChatError(f"{self._name}: {error or type(error).__name__}") from None


def load_template(directory: str | Path) -> ChatTemplate:
    """The template of a checkpoint: chat_template.jinja, else that of tokenizer_config.json.

    Raises:
      ChatError: there is none, or it is wrong.
    """
    file, config_file = Path(directory) / "chat_template.jinja", Path(directory) / "tokenizer_config.json"
    try:
        config = json.loads(config_file.read_bytes()) if config_file.is_file() else {}
        source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    except (OSError, ValueError, AttributeError) as error:
        raise ChatError(f"{directory}: its chat template can't be read ({error})") from None
    if isinstance(source, list):  # several, by name
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not isinstance(source, str):
        raise ChatError(f"{directory}: has no chat template; leave out --chat, or add {file.name}")
    tokens = {name: _text(value) for name, value in config.items() if name.endswith("_token") and _text(value)}
    return ChatTemplate(source, tokens, str(file if file.is_file() else config_file))


def _text(token: Any) -> str | None:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators=None, sort_keys=False) -> str:
    """JSON as it is: Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(style: str) -> str:
    return datetime.datetime.now().strftime(style)
