"""Degenerate text is flagged whatever it looks like; good text in any form is not."""

from __future__ import annotations

import random
import string

import pytest

from bakehouse.probe.text_quality import RULES, find_defects

SEEN = {
    "GB10 without its architecture": "????????????????????????????????????????",
    "DeepGEMM off": "<|eom|>_cassistant_",
    "miscompiled": "GGGGGGGGGGGGGGGGGGGGGGGG",
    "FP4 experts": "lockhandlehandlehandlehandle",
    "NVFP4": '|| """.||multimult||multmult |multmult |\nmultmultimultimultmulti||multimult',
    "broken revision": " the of France is the of France is",
    "exclamation marks": "!" * 64,
    "four of one": "GGGG",
    "zeros": "0 " * 50,
    "dots": ". . . . . . . . . . .",
    "a sentence for ever": "I am a cat. " * 20,
    "a loop at the end": "Bread is made of flour and water. First you mix them."
    + " Then you knead." * 8,
    "a line for ever": "The sea is wide.\n" + "It is blue and deep and wide.\n" * 6,
    "a word for ever": "The sea is very" + " very" * 40,
    "replacement characters": "The sea \ufffd\ufffd\ufffd is wide",
    "control characters": "The sea\x00\x01 is \x02 wide and deep",
    "private use": "The sea \ue000\ue001 is wide",
    "scripts": "The море is بحر and 海 of दुनिया wide and ทะเล in it",
    "scripts within words": "The seaМоре isвода and greatнеt over theы end of itп all",
    "words stuck together": "theseatheseathesea and more of it",
    "no spaces": "theseaiswideandblueandverydeepandmanyfishliveinitandnobodyknowsallofthemyet",
    "end of turn": "A nice sea.<end_of_turn>\n<start_of_turn>user",
    "end of sequence": "A nice sea.</s>",
    "instruction": "Sure [/INST] yes, it is a nice day and so on.",
    "unknown": "The <unk> sea <unk> is wide.",
    "byte tokens": "The sea<0x0A><0x0A>is wide.",
    "DeepSeek's": "The sea<｜end▁of▁sentence｜> is wide.",
    "a bare role": "The sea is wide.\nassistant\nThe sea is wide and blue.",
    "a counting loop": "".join(f"{n}. The sea is blue and wide.\n" for n in range(1, 12)),
    "empty": "",
    "blank": " \n\t ",
}


def test_fluency_flags_degenerate_text() -> None:
    found = {name: {flaw.id for flaw in find_defects(text)} for name, text in SEEN.items()}
    assert [name for name, ids in found.items() if not ids or not ids <= set(RULES)] == []


GOOD = {
    "short": "The capital of France is Paris.",
    "paragraph": (
        "The sea is one of the most fascinating places on Earth. Its waves rise and fall with the "
        "wind, and beneath them lives a world of fish, corals and plants. People have crossed it "
        "for thousands of years, and it still holds secrets that nobody has seen."
    ),
    "cut off in the middle": "The sea is a vast body of salt water that covers most of this w",
    "cut off in a character": "Das Meer ist groß und sch\ufffd",
    "Chinese": (
        "大海是地球上最神秘的地方之一。清晨，阳光洒在海面上，波光粼粼；傍晚，海浪轻轻拍打着沙滩，"
        "好像在讲述古老的故事。我喜欢坐在海边，听海风吹过，心里十分平静。"
    ),
    "Chinese with English": (
        "我们可以使用Python编程语言和GPU来训练模型。首先安装PyTorch，然后运行train.py脚本即可。"
    ),
    "Japanese": (
        "海はとても広くて青いです。夏になると、たくさんの人がビーチで泳いだり、砂の城を作ったりします。"
    ),
    "Korean": "바다는 넓고 푸르다. 아침이면 어부들이 배를 타고 나가 물고기를 잡는다. 시원하다.",
    "Russian": (
        "Море было спокойным, и только у берега шумели волны. Мы купили iPhone и пошли домой."
    ),
    "Arabic": "البحر واسع وأزرق، وتعيش فيه أسماك كثيرة. يحب الناس الجلوس على الشاطئ عند الغروب.",
    "Hindi": "समुद्र बहुत बड़ा और नीला होता है। उसमें कई प्रकार की मछलियाँ रहती हैं।",
    "German compounds": (
        "Das Rindfleischetikettierungsüberwachungsaufgabenübertragungsgesetz war ein langes Wort."
    ),
    "code": (
        "Here is the function:\n\n```python\ndef add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n"
        "    return a - b\n\n\ndef mul(a, b):\n    return a * b\n```\n\nIt adds, subtracts and "
        "multiplies two numbers."
    ),
    "repetitive code": "\n".join(
        f'    case {n}: printf("%s\\n", names[{n}]); break;' for n in range(9)
    ),
    "JSON": '{"users": [{"id": 1, "name": "Ann"}, {"id": 2, "name": "Ben"}, {"id": 3}]}',
    "list": (
        "1. Flour\n2. Water\n3. Salt\n4. Yeast\n5. A little oil\n6. Sugar\n7. Time and patience"
    ),
    "table": (
        "| City | Country | People |\n|------|---------|--------|\n"
        "| Paris | France | 2.1 million |\n| Berlin | Germany | 3.6 million |\n"
        "| Madrid | Spain | 3.3 million |"
    ),
    "table of numbers": "\n".join(f"| {n} | {n * n} | {n**3} |" for n in range(1, 11)),
    "multiplication table": "\n".join(f"7 x {n} = {7 * n}" for n in range(1, 11)),
    "identity matrix": "1 0 0\n0 1 0\n0 0 1",
    "poem with a refrain": (
        "The wind is on the water now,\nCome home, my love, come home,\nThe gulls are crying round "
        "the bow,\nCome home, my love, come home.\nThe lamp is burning on the sill,\nCome home, my "
        "love, come home,\nThe night is long, the house is still,\nCome home, my love, come home."
    ),
    "a song": "La la la la la, the sun is up,\nLa la la la la, I fill my cup,\nHey hey hey, we go!",
    "laughter": "Hahahahaha! That is very funny. Nooooo, wait, soooo good!!!",
    "markdown": "# Bread\n\n---\n\n**Bread** is *old*.\n\n- flour\n- water\n\n***\n\nThe end.",
    "rulers": "Part one\n" + "=" * 40 + "\nText comes here.\n" + "-" * 40 + "\nMore text here.",
    "formula": "The energy is $E = mc^2$, with $\\alpha \\approx 1/137$ and a width of 5 μm (Δx).",
    "money": "It costs $1,000,000,000,000 or 1000000000000 in all, that is 10^12.",
    "emoji": "I love the sea! 🌊🌊🌊 It is so blue 💙 and calm 😊.",
    "tags in code": "Strike it with `<s>text</s>`, and end the turn with `<|im_end|>` in ChatML.",
    "quotes": '"Yes," she said. "No," he said. "Yes," she said again. "Well," he said, "maybe."',
}


def test_fluency_accepts_good_text() -> None:
    found = {name: find_defects(text) for name, text in GOOD.items()}
    assert {name: defects for name, defects in found.items() if defects} == {}


@pytest.mark.parametrize("times", [4, 30])
def test_fluency_flags_good_text_that_is_repeated(times: int) -> None:
    texts = {name: text for name, text in GOOD.items() if any(c.isalpha() for c in text)}
    assert [name for name, text in texts.items() if not find_defects(f"{text}\n" * times)] == []


def test_fluency_flags_a_loop_of_any_piece_after_good_text() -> None:
    missed = []
    for seed in range(40):
        random_ = random.Random(seed)
        words = ["".join(random_.choices(string.ascii_lowercase, k=random_.randint(2, 8)))
                 for _ in range(random_.randint(1, 7))]  # fmt: skip
        loop = f" {' '.join(words)}" * (80 // len(" ".join(words)) + 5)
        if not find_defects(GOOD["paragraph"] + loop):
            missed.append(loop)
    assert missed == []


def test_fluency_takes_bounded_time_on_hostile_text() -> None:
    for text in ("a" * 10**6, "ab" * 10**6, "\ufffd" * 10**6, "<|" * 10**6, "`" * 10**6):
        assert find_defects(text)
