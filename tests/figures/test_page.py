"""The page of all figures."""

import json
import re

import pytest

pytest.importorskip("plotly")

from transformer import explorer, figures
from transformer.figures.page import SECTIONS, page
from transformer.figures.words import WORDS


def test_every_figure_that_needs_no_model_of_one_s_own_is_on_the_page():
    drawn = {name for _, section in SECTIONS for name, _ in section}
    assert drawn == set(figures.__all__) - {"attention_heads"}
    assert all(f"{what} {name}" in WORDS for name, _ in SECTIONS for what in ("section", "about"))


def test_a_page_holds_its_figures_and_loads_nothing():
    few = [section for section in SECTIONS if section[0] in ("attention", "rope")]
    made = page("zh", "dark", few)
    for name, drawn in few:
        assert f'<h2 id="{name}">' in made and f'href="#{name}"' in made
        assert all(f'id="{name}-{number}"' in made for number in range(len(drawn)))
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=", made)
    assert json.dumps("小猫") in made or "小猫" in made


def test_a_place_that_is_not_there_is_refused(tmp_path, capsys):
    assert explorer.main([str(tmp_path / "none" / "out.html")]) == 2
    assert "no directory" in capsys.readouterr().err
