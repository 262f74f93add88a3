"""The one table of words: every phrase of the figures in each language."""

from transformer.figures.words import mechanisms, models, page, questions, runs

LANGUAGES = ("en", "zh")

# The running example: 小猫跑了一天，它很 → 累, and what its tokens mean.
TOKENS = {
    1: ("BOS", "BOS"),
    10: ("kitten", "小猫"),
    11: ("run", "跑"),
    12: ("-ed", "了"),
    13: ("all day", "一天"),
    14: (",", "，"),
    15: ("it", "它"),
    16: ("is so", "很"),
    17: ("tired", "累"),
    18: ("sleep", "睡"),
    19: ("awake", "精神"),
}

WORDS = models.WORDS | mechanisms.WORDS | runs.WORDS | page.WORDS | questions.WORDS
