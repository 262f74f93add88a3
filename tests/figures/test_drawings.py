"""Every figure is drawn in both languages and themes, and every word is there in both."""

import functools
import inspect
import re
from string import Formatter

import numpy as np
import pytest

pytest.importorskip("plotly")

from tests import common
from transformer import figures
from transformer.figures.data import experts, journey
from transformer.figures.look import PALETTES, Look
from transformer.figures.words import TOKENS, WORDS, mechanisms, models, page, questions, runs


@functools.cache
def reduced(name: str) -> dict:
    """What a figure needs, or takes so that little is computed: figures of the defaults are drawn by the notebooks."""
    match name:
        case "attention_heads":
            return dict(model=common.model("llama3"), params=common.params("llama3"), token_ids=[3, 1, 4, 1, 5])
        case "cache_sizes":
            return dict(layers=2)
        case "decoding_flops":
            return dict(lengths=(1, 2))
        case "dropped_tokens" | "router_grid":
            return dict(references=("mixtral:8x7b",))
        case "expert_load":
            even = np.full((2, 8), 1 / 8)
            return dict(runs={"none": experts.Balancing(np.ones(3), even, even, np.ones(3), np.zeros((4, 2), int))})
        case "step_traffic":
            return dict(fsdp=2)
        case "router_picks":
            return dict(model=common.model("mixtral"), params=common.params("mixtral"), token_ids=[3, 1, 4, 1, 5])
        case "training_curves" | "run_panels":
            return dict(workdir="no run yet")
        case "run_layers":
            return dict(workdir="no run yet", what="gradient")
        case "receptive_field":
            return dict(windows=(2, None), length=6)
        case "token_journey":
            stages = tuple(journey.Stage("stage ffn", dict(layer=0), np.ones(4), stream) for stream in (True, False))
            return dict(journey=journey.Journey(stages, np.ones((1, 2, 3)), np.arange(20.0), np.ones(20) / 20))
    return {}


HAN = re.compile(r"[\u4e00-\u9fff]")


@pytest.mark.parametrize("name", figures.__all__)
def test_every_figure_is_drawn_in_both_languages_and_themes(name):
    draw = functools.partial(getattr(figures, name), **reduced(name))
    english, chinese = draw(), draw(language="zh", theme="dark")
    assert len(english.data) == len(chinese.data) > 0
    assert not HAN.search(english.layout.title.text) and HAN.search(chinese.layout.title.text)
    papers = [figure.layout.paper_bgcolor for figure in (english, chinese)]
    assert papers == [PALETTES["light"].paper, PALETTES["dark"].paper]
    for figure in (english, chinese):
        for frame in figure.frames:
            assert [trace.type for trace in frame.data] == [trace.type for trace in figure.data]
            assert frame.layout.title.text, "each step has its own title"


def test_every_step_of_a_slider_has_room_for_its_bars():
    drawn = figures.cache_sizes(layers=2)
    for frame in drawn.frames:
        tallest = max(bar for trace in frame.data if trace.type == "bar" for bar in trace.y)
        assert tallest < frame.layout.yaxis.range[1] < 2 * tallest, frame.name
    for frame in figures.expert_parameters().frames:
        assert frame.layout.yaxis.range is None, "plotly's own choice"


@pytest.mark.parametrize("name", figures.__all__)
def test_every_figure_takes_a_language_and_a_theme(name):
    parameters = inspect.signature(getattr(figures, name)).parameters
    assert (parameters["language"].default, parameters["theme"].default) == ("en", "light")


def test_words_have_the_same_gaps_in_both_languages():
    def gaps(text: str) -> set:
        return {field for _, field, _, _ in Formatter().parse(text) if field}

    assert len(WORDS) == sum(len(part.WORDS) for part in (mechanisms, models, page, questions, runs)), "a key twice"
    for key, (english, chinese) in WORDS.items():
        assert english and chinese and gaps(english) == gaps(chinese), key
    for english, chinese in TOKENS.values():
        assert english and chinese and not HAN.search(english)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="language='de': use one of en, zh"):
        Look(language="de")
    with pytest.raises(ValueError, match="theme='blue': use one of light, dark"):
        Look(theme="blue")
    with pytest.raises(AttributeError, match="attention_steps"):
        _ = figures.attention_step
