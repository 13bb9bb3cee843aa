"""Texts that pre-tokenizers disagree about: digits, whitespace, scripts, marks, emoji, specials."""

# ruff: noqa: RUF001

from __future__ import annotations

import random

TEXTS = (
    "",
    " ",
    "   ",
    "Hello, world!",
    " leading and trailing ",
    "a  b   c    d",
    "\n",
    "\n\n\n",
    " \n \n\n  x",
    "x\r\ny\r\n\r\nz",
    "\t\tindent\n\t x",
    "   \n",
    "12345678901",
    "3.14159 1,000,000 x1y22z333",
    "٣٤٥ ①② ½ Ⅷ ²³",
    "I'm you're we've they'll he'd it's don't CAN'T I'M YOU'RE 'S 's 'tis",
    "’s l’été",
    "你好，世界！这是一个测试。",
    "日本語のテキスト ー カタカナ",
    "한국어 텍스트",
    "Россия и Украина",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "Zwölf Boxkämpfer, Straße",
    "e\u0301 a\u0308 ﬁ Å",
    "👨‍👩‍👧‍👦🌶️ 😀👍🏽🇺🇸❤️",
    "\u00a0nbsp\u00a0x\u3000y\u200bz\u200dw\u2028v\ufeff",
    "<|im_start|>user\nhi<|im_end|>\n",
    "a</s>b<|im_start|",
    "def f(x):\n    return x ** 2  # c\n\n\nclass A:\n\tpass\n",
    "!!!???...---(parens)[x]{y} $^+=|~`",
    "http://a.b/c?d=e&f=g A_B-C camelCase HTTPServer",
    "\x00\x01\x7f",
    "x" * 300 + " " * 100 + "\n" * 50 + "0" * 100,
)
_PIECES = (
    " ", "  ", "\n", "\r\n", "\t", "a", "B", "é", "ß", "1", "٣", "½", "'s", "'LL", "’", "-", "!",
    "你", "あ", "한", "😀", "\u200d", "\u0301", "<|im_end|>", "_", "/", "\u00a0", "Ж", "ا", "ǅ",
    "ʰ", "\u0903",
)  # fmt: skip


def random_texts(count: int, seed: int = 5) -> list[str]:
    """Texts of up to 25 random pieces."""
    numbers = random.Random(seed)
    return ["".join(numbers.choices(_PIECES, k=numbers.randint(1, 25))) for _ in range(count)]
