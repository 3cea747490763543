"""The text of an answer as it comes: whole characters, and nothing behind a stop text."""

import random

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from glax.models.tokens import REPLACEMENT, TOKENIZER, Bytes, FromFile
from glax.server.text import StopFinder, TextStream, TokenBytes

pytestmark = pytest.mark.fast
TEXT = "The quick brown fox, é à ñ, 你好世界, 😀👩‍👩‍👧, <b>&amp;</b>\n\n\tjumps   over. "


def byte_level() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet)
    )
    return made


def sentence_pieces() -> tokenizers.Tokenizer:
    """A tokenizer as those of Llama: pieces with spaces, bytes for the rest, and a decoder that drops the first space."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"Thequickbrownfxjmpsv.,"]
    made = tokenizers.Tokenizer(
        models.BPE({x: i for i, x in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["</s>"])
    return made


@pytest.fixture(params=["bytes", "byte level", "sentence pieces"])
def tokenizer(request, tmp_path):
    if request.param == "bytes":
        return Bytes()
    made = byte_level() if request.param == "byte level" else sentence_pieces()
    made.save(str(tmp_path / TOKENIZER))
    return FromFile(tmp_path / TOKENIZER)


def pieces_of(stream: TextStream, tokens) -> list[str]:
    return [stream.push(token) for token in tokens] + [stream.finish()]


def test_the_pieces_of_a_text_are_its_text_without_replacement_characters(tokenizer):
    tokens = tokenizer.encode(TEXT * 3)
    assert len(tokens) > 100
    pieces = pieces_of(TextStream(tokenizer), tokens)
    assert "".join(pieces) == tokenizer.decode(tokens) and not any(REPLACEMENT in piece for piece in pieces)
    assert pieces[-1] == ""


def test_the_pieces_behind_a_prompt_are_the_rest_of_the_text(tokenizer):
    tokens = tokenizer.encode(TEXT * 2)
    whole = tokenizer.decode(tokens)
    for cut in range(len(tokens)):
        before = tokenizer.decode(tokens[:cut])
        if whole.startswith(before):
            assert before + "".join(pieces_of(TextStream(tokenizer, tokens[:cut]), tokens[cut:])) == whole
        else:  # the prompt ends amid a character
            assert "".join(pieces_of(TextStream(tokenizer, tokens[:cut]), tokens[cut:])) == tokenizer.decode(
                tokens[cut:]
            )


@pytest.mark.parametrize("seed", range(20))
def test_any_tokens_have_the_text_that_they_decode_to(seed, tmp_path):
    byte_level().save(str(tmp_path / TOKENIZER))
    draw = random.Random(seed)
    for tokenizer in (Bytes(), FromFile(tmp_path / TOKENIZER)):
        # Few kinds of tokens, so that broken characters are frequent, and long runs of broken ones too.
        kinds = [draw.randrange(tokenizer.vocabulary) for _ in range(draw.choice((3, 10, 200)))]
        tokens = [draw.choice(kinds) for _ in range(200)]
        assert "".join(pieces_of(TextStream(tokenizer), tokens)) == tokenizer.decode(tokens)


def test_a_long_run_of_bytes_costs_the_same_for_each_token():
    class Counting(Bytes):
        longest = 0

        def decode(self, tokens, skip_special_tokens=True):
            self.longest = max(self.longest, len(tokens))
            return super().decode(tokens)

    for tokens in ([0x80] * 500, [0xE2] * 500, list(b"abc" * 200), [0xF0, 0x9F, 0x98] * 200):
        tokenizer = Counting()
        assert "".join(pieces_of(TextStream(tokenizer), tokens)) == Bytes().decode(tokens)
        assert tokenizer.longest < 60


def test_bytes_that_make_no_character_come_at_the_end():
    stream = TextStream(Bytes())
    assert [stream.push(token) for token in b"a\xf0\x9f\x98"] == ["a", "", "", ""]
    assert stream.finish() == REPLACEMENT


def found_text(stops, pieces) -> tuple[str, bool]:
    finder = StopFinder(stops)
    parts = [finder.push(piece) for piece in pieces]
    whole = "".join(parts) + finder.push("", is_whole=True)
    return whole, finder.found


@pytest.mark.parametrize("seed", range(50))
def test_text_ends_before_the_first_stop_however_it_is_cut(seed):
    draw = random.Random(seed)
    text = "".join(draw.choice("ab\n") for _ in range(60))
    stops = ["".join(draw.choice("ab\n") for _ in range(draw.randint(2, 6))) for _ in range(draw.randint(1, 3))]
    cuts = sorted(draw.sample(range(60), 12))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, 60], strict=True)]
    ends = [text.find(stop) for stop in stops if stop in text]
    assert found_text(stops, pieces) == (text[: min(ends)] if ends else text, bool(ends))


def test_text_that_may_begin_a_stop_is_held_back():
    finder = StopFinder(["\n\nQ:"])
    assert [finder.push(piece) for piece in ("a\n", "\nQ", "b", "\n\nQ:c")] == ["a", "", "\n\nQb", ""]
    assert finder.found and finder.push("d") == ""


def test_the_bytes_of_tokens_make_up_the_text(tokenizer):
    known, tokens = TokenBytes(tokenizer), tokenizer.encode(TEXT)
    assert b"".join(map(known.of, tokens)).decode().strip() == tokenizer.decode(tokens).strip() == TEXT.strip()
    assert known.of(10**6) == b""


def test_a_token_that_looks_like_a_byte_is_its_text(tmp_path):
    made = tokenizers.Tokenizer(models.WordLevel({"<0xZZ>": 0, "<0x+1>": 1, "<0x41>": 2}, unk_token="<0xZZ>"))
    made.save(str(tmp_path / TOKENIZER))
    assert [*map(TokenBytes(FromFile(tmp_path / TOKENIZER)).of, range(3))] == [b"<0xZZ>", b"<0x+1>", b"A"]


def test_a_special_token_is_known_by_its_text(tokenizer):
    token = TokenBytes(tokenizer).special.get("</s>")
    assert (token is None) == isinstance(tokenizer, Bytes)
    assert token is None or tokenizer.decode([token], skip_special_tokens=False) == "</s>"
    assert "The" not in TokenBytes(tokenizer).special
