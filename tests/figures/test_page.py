"""The page of all figures, as text; tests/figures/test_browser.py reads it in a browser."""

import json
import re

import pytest

pytest.importorskip("plotly")

from transformer import explorer, figures
from transformer.figures import page as pages
from transformer.figures import questions
from transformer.figures.look import Look, repainted
from transformer.figures.sections import SECTIONS, Choice, Section, Shown
from transformer.figures.words import WORDS
from transformer.spec import Mask

MASKS = Choice("mask", {"causal": {}, "a window": dict(mask=Mask(causal=True, window=6))})
SHORT = [Section("journey", (Shown("softmax_steps"),)), Section("tiles", (Shown("online_softmax", (MASKS,)),))]


@pytest.fixture(scope="module")
def made():
    return pages.page("zh", "dark", SHORT)


def kept(made: str) -> list[dict]:
    """What the figures of a page keep as JSON."""
    return [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', made)]


def test_every_figure_that_needs_no_model_of_one_s_own_is_on_the_page():
    drawn = {shown.figure for section in SECTIONS for shown in section.shown}
    own = {"attention_heads", "router_picks", "training_curves", "run_panels", "run_layers"}
    assert drawn == set(figures.__all__) - own
    assert all(f"{what} {section.name}" in WORDS for section in SECTIONS for what in ("section", "about"))
    assert all(
        f"choose {choice.name}" in WORDS for section in SECTIONS for shown in section.shown for choice in shown.choices
    )


def test_a_page_holds_its_figures_and_loads_nothing(made):
    for section in SHORT:
        assert f'<h2 id="{section.name}">' in made and f'href="#{section.name}"' in made
        assert all(f'<figure id="{section.name}-{i}"' in made for i in range(len(section.shown)))
    assert not re.search(r"<(script|img|iframe)[^>]+(src|href)=|<link[^>]+href=\"(?!data:)", made)
    assert "小猫" in made and 'asked="dark"' in made


def test_a_page_keeps_each_step_of_each_choice(made):
    weights, online = kept(made)
    assert list(online["variants"]) == ["0", "1"]
    for variant, count in zip(online["variants"].values(), (4, 3), strict=True):
        assert [step["name"] for step in variant["steps"]] == list("1234")[:count] and variant["start"] == 0
        assert "sliders" not in variant["layout"] and variant["prompt"] == "分块"
        errors = [float(re.search(r"最大差：(\S+)", step["title"][1])[1]) for step in variant["steps"]]
        assert errors[-1] < 1e-6 < 1e-2 < min(errors[:-1]), "the last output is the ordinary softmax's"
    total = sum(len(step["traces"]) for variant in online["variants"].values() for step in variant["steps"])
    assert len(online["traces"]) < total, "what does not change is kept once"
    assert len(weights["variants"][""]["steps"]) == 1 and "1" in online["variants"]


def test_a_theme_is_a_change_of_colours(made):
    """The page has light figures; by its table of colours they turn into what the package draws for the dark theme."""
    table = repainted()
    assert len(set(table.values())) > 10 and not set(table) & set(table.values())
    for text in re.findall(r'<script type="application/json">(.*?)</script>', made):
        colors = set(re.findall(r'"(#[0-9a-fA-F]{3,8})"', text))
        assert colors and colors <= set(table)
    # What plotly's own template says is left out of the page.
    bare = [figures.softmax_steps(theme=theme).update_layout(template={}) for theme in ("light", "dark")]
    light, dark = (figure.to_json() for figure in bare)
    assert re.sub(r"#[0-9a-f]{6}\b", lambda color: table.get(color[0], color[0]), light) == dark


@pytest.mark.parametrize("language", ["en", "zh"])
def test_answers_point_to_figures(language):
    asked = questions.asked(Look(language))
    places = {f"{section.name}-{i}" for section in SECTIONS for i in range(len(section.shown))}
    assert len(asked) == 6
    for question, answer in asked:
        assert question.endswith(("?", "？"))
        linked = re.findall(r"\]\(#([\w-]+)\)", answer)
        assert linked and set(linked) <= places


def test_a_place_that_is_not_there_is_refused(tmp_path, capsys):
    assert explorer.main([str(tmp_path / "none" / "out.html")]) == 2
    assert "no directory" in capsys.readouterr().err
    with pytest.raises(ValueError, match="theme='blue': use one of auto, light, dark"):
        pages.page(theme="blue")
