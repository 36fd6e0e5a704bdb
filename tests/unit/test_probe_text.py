"""Answers are found as whole words in any script, and degenerate text is told from text."""

from __future__ import annotations

import random
import string

from hypothesis import given
from hypothesis import strategies as st

from bakehouse.probe.text_quality import (
    MARKS,
    asserted,
    holds,
    lists,
    loops,
    normal,
    same_words,
    without_echo,
)

FOUND = [
    ("2+2=4.", "4"),
    ("**4**", "4"),
    (r"\boxed{4}", "4"),
    ("the answer is 4, of course", "4"),
    ("答案是4个", "4"),
    ("４", "4"),
    ("٤", "4"),
    ("④", "4"),
    ("H₂O", "H2O"),
    ("H<sub>2</sub>O", "h2o"),
    ("H_2O, water", "H2O"),
    (r"$\mathrm{H}_2\mathrm{O}$", "H2O"),
    (r"\(\text{H}_2\text{O}\)", "H2O"),
    ("H~2~O", "H2O"),
    ("PARIS!", "Paris"),
    ("_Paris_", "Paris"),
    ("`Paris`", "Paris"),
    ("Paris's", "Paris"),
    ("New\n  York", "New York"),
    ("Pa\u00adris", "Paris"),
    ("die Straße", "STRASSE"),
    ("Sao\u0301", "Saó"),
    ("法国的首都是巴黎。", "巴黎"),
    ("日本の首都は東京です", "東京"),
    ("프랑스의 수도는 파리입니다", "파리"),
    ("เมืองหลวงคือปารีสครับ", "ปารีส"),
    ("答案：七", "七"),
    ("столица — Париж", "париж"),
    ("about 4 (four)", "four"),
    ("four-legged", "four"),
    ("day-7", "7"),
]


def test_answers_are_found_as_whole_words() -> None:
    assert [row for row in FOUND if not holds(normal(row[0]), normal(row[1]))] == []


NOT_FOUND = [
    ("14", "4"),
    ("4.5", "4"),
    ("3.4", "4"),
    ("4,000", "4"),
    ("it is -4", "4"),
    ("-4", "4"),
    ("4²", "42"),
    ("b4", "4"),
    ("twenty-four", "four"),
    ("twenty four", "four"),
    ("seventeen", "seven"),
    ("Parisian", "Paris"),
    ("comparison", "paris"),
    ("scold", "cold"),
    ("H2O2", "H2O"),
    ("七十七", "七"),
    ("十四", "四"),
    ("", "4"),
    ("anything", ""),
]


def test_answers_are_not_found_in_other_words_and_numbers() -> None:
    assert [row for row in NOT_FOUND if holds(normal(row[0]), normal(row[1]))] == []


@given(st.text())
def test_normal_text_stays_as_it_is(text: str) -> None:
    once = normal(text)
    assert "\n" not in once
    assert normal(once).replace(" ", "") == normal(normal(once)).replace(" ", "")


@given(st.text(alphabet=string.ascii_letters, min_size=1), st.text(alphabet=" .,!?\n*"))
def test_a_word_between_marks_is_found(word: str, marks: str) -> None:
    assert holds(normal(f"{marks} {word} {marks}"), normal(word))


ECHOES = [
    ("The opposite of hot is cold.", "What is the opposite of hot?", "cold"),
    ("What is the opposite of hot?", "What is the opposite of hot?", ""),
    ("What is 2+2? 4", "What is 2+2?", "4"),
    ("2+2=4", "2+2=", "4"),
    ("法国的首都是巴黎", "法国的首都是哪里？", "巴黎"),
    ("Which is bigger, 9.11 or 9.8? 9.8", "Which is bigger, 9.11 or 9.8?", "9.8"),
    ("nothing in common", "What is the capital of Germany?", "nothing in common"),
]


def test_text_loses_the_echo_of_its_question() -> None:
    got = []
    for text, question, _ in ECHOES:
        rest = without_echo(normal(text), normal(question))
        words = [w for w in rest.replace("?", " ").split() if w not in (".", "is")]
        got.append(" ".join(words).strip(" .="))
    assert got == [left for _, _, left in ECHOES]


LOOPS = [
    "?" * 40,
    "lockhandlehandlehandlehandlehandlehandlehandle",
    " the of France is the of France is the of France is the of France is the of France is",
    "Paris " * 30,
    "巴黎" * 30,
    "Il Corriere dii, " * 12,
    "The capital of France is Paris, and the capital of Germany is Berlin, and so on. " * 20,
]
PROSE = [
    "The opposite of hot is cold. This is a fundamental concept in science, where heat is of fire.",
    "4",
    "Paris.",
    "The user asks for a capital. France is in Europe. I say Paris. Let me see: Paris? Yes, Paris.",
    "1, 2, 3, 4",
    "法国的首都是巴黎。巴黎位于法国北部，塞纳河穿城而过，是法国的政治、经济和文化中心。",
]


def test_loops_are_detected_and_prose_is_neither_a_loop_nor_a_list() -> None:
    assert [text for text in LOOPS if not loops(normal(text))] == []
    assert [text for text in PROSE if loops(normal(text)) or lists(text)] == []
    mixer = random.Random(1)
    words = mixer.choices(["paris", "the", "of", "is", "france"], k=120)
    assert loops(" ".join(words))


def test_many_short_items_are_a_list() -> None:
    cities = "London, Berlin, Madrid, Rome, Paris, Vienna, Prague, Oslo, Bern, Kyiv, Riga, Athens"
    assert lists(cities)
    assert lists(cities.replace(", ", "\n- "))
    assert lists("北京、东京、巴黎、伦敦、柏林、罗马、马德里、维也纳、布拉格、雅典、奥斯陆、伯尔尼")


DENIALS = [
        ("it is not paris.", False), ("it isn't the 4", False), ("this was never 4", True),
        ("i wonder whether it is paris or not", False), ("das ist nicht berlin", False),
        ("not rome, but paris", True), ("it is not only paris", True),
        ("it is paris, not rome", True),
]  # fmt: skip


def test_text_does_not_assert_what_it_denies() -> None:
    answers = ("paris", "4", "berlin")
    got = [(text, any(holds(asserted(text), a) for a in answers)) for text, _ in DENIALS]
    assert got == DENIALS


def test_tags_separate_words() -> None:
    texts = ["x<br>4", "<p>4</p>", "thought<channel|>4", "a<|end|>4", "<td>4</td>"]
    assert [text for text in texts if not holds(normal(text), "4")] == []


def test_marks_without_end_are_cut() -> None:
    assert len(normal("a" + "\u0316\u0301" * 1000)) <= 1 + MARKS
    assert normal("e\u0301") == normal("é")


def test_words_that_all_answers_share() -> None:
    tail = "let me know if you have any other questions"
    assert same_words([f"{n} {tail}" for n in range(4)]) == tail.split()
    assert same_words([f"{tail} {n}" for n in range(4)]) == tail.split()
    assert same_words([f"{n} {tail}" for n in range(3)]) == []
    assert same_words([f"{n} is the answer" for n in range(8)]) == []
