"""Every figure is drawn in both languages and themes, and every word is there in both."""

import inspect
import re
from string import Formatter

import pytest

pytest.importorskip("plotly")

from tests import common
from transformer import figures
from transformer.figures.look import Look
from transformer.figures.words import TOKENS, WORDS

# What figures need that has no default.
ARGUMENTS = {
    "attention_heads": lambda: (common.model("llama3"), common.params("llama3"), [3, 1, 4, 1, 5]),
}
HAN = re.compile(r"[\u4e00-\u9fff]")


@pytest.mark.parametrize("name", figures.__all__)
def test_every_figure_is_drawn_in_both_languages(name):
    draw, arguments = getattr(figures, name), ARGUMENTS.get(name, tuple)()
    english, chinese = (draw(*arguments, language=language) for language in ("en", "zh"))
    assert len(english.data) == len(chinese.data) > 0
    assert not HAN.search(english.layout.title.text) and HAN.search(chinese.layout.title.text)
    assert english.layout.paper_bgcolor != draw(*arguments, theme="dark").layout.paper_bgcolor


@pytest.mark.parametrize("name", figures.__all__)
def test_every_figure_takes_a_language_and_a_theme(name):
    parameters = inspect.signature(getattr(figures, name)).parameters
    assert (parameters["language"].default, parameters["theme"].default) == ("en", "light")


def test_words_have_the_same_gaps_in_both_languages():
    def gaps(text: str) -> set:
        return {field for _, field, _, _ in Formatter().parse(text) if field}

    for key, (english, chinese) in WORDS.items():
        assert english and chinese and gaps(english) == gaps(chinese), key
    for english, chinese in TOKENS.values():
        assert english and chinese and not HAN.search(english)


def test_unknown_looks_are_refused():
    with pytest.raises(ValueError, match="language='de': use one of en, zh"):
        Look(language="de")
    with pytest.raises(ValueError, match="theme='blue': use one of light, dark"):
        Look(theme="blue")
