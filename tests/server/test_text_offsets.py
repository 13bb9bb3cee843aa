"""Offsets of tokens in a text, with tokenizers that put something before it."""

from __future__ import annotations

import tokenizers
from tests.checkpoints import tiny_tokenizer
from tokenizers import decoders, models, pre_tokenizers

from trunkline.engine.tokenizer import Tokenizer
from trunkline.server.openai.logprobs import TextOffsets
from trunkline.server.token_text import TokenTexts

PROMPT, ANSWER = "the quick é漢字 <s>fox", " jumps 👩‍👧 over"


def offsets_of(tokenizer: Tokenizer, prompt: str, answer: str) -> None:
    """Whole-character tokens that the text shows stand where their offsets say."""
    texts = TokenTexts(tokenizer)
    offsets = TextOffsets(texts, prompt, skips_special=True)
    text, last = prompt + answer, 0
    [prompt_ids] = tokenizer.encode_batch([prompt])
    [answer_ids] = tokenizer.encode_batch([answer], add_special_tokens=False)
    ids = [*prompt_ids, *answer_ids, 2]
    for position, token in enumerate(ids):
        of_one = offsets.of_prompt if position < len(prompt_ids) else offsets.of_output
        offset = of_one(token)
        piece = texts.text(token)
        assert offset >= last
        last = offset
        if "\N{REPLACEMENT CHARACTER}" in piece or texts.is_hidden(token):
            continue
        assert text[offset:].startswith(piece if offset else piece.lstrip(" ")), (offset, piece)
    assert last == len(text)


def test_a_bos_is_not_in_the_text() -> None:
    tokenizer = Tokenizer(tiny_tokenizer(), {"bos_token": "<s>"})
    assert tokenizer.encode_batch(["a"])[0][0] == 1
    offsets_of(tokenizer, PROMPT, ANSWER)
    offsets_of(tokenizer, "<s>the", " fox")


def test_a_space_before_the_first_word_is_not_in_the_text() -> None:
    words = ["<unk>", "<s>", "</s>", "▁the", "▁fox", "▁", "x"]
    backend = tokenizers.Tokenizer(
        models.Unigram([(word, -1.0) for word in words], unk_id=0, byte_fallback=False)
    )
    backend.add_special_tokens(["<s>", "</s>"])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    offsets_of(Tokenizer(backend, {}), "the fox x", " the fox")
