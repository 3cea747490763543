"""Tokenizers: what a tokenizer.json holds for batches and training changes no token; what cannot be read is an error."""

import json
import os

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from glax.models.tokens import TOKENIZER, Bytes, FromFile, find_tokenizer, read_tokens

TEXT = "the quick brown fox jumps over the lazy dog. " * 100


@pytest.fixture(scope="module")
def trained() -> str:
    """A tokenizer.json of the package, trained on TEXT."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>", "<pad>"], initial_alphabet=alphabet)
    made.train_from_iterator([TEXT], trainer)
    return made.to_str()


def changed(trained: str, tmp_path, change) -> FromFile:
    made = tokenizers.Tokenizer.from_str(trained)
    change(made)
    made.save(str(tmp_path / TOKENIZER))
    return FromFile(tmp_path / TOKENIZER)


@pytest.mark.parametrize(
    "change",
    [
        lambda made: made.enable_truncation(40),
        lambda made: made.enable_truncation(40, strategy="only_first", direction="left"),
        lambda made: made.enable_padding(length=9000, pad_id=2, pad_token="<pad>"),
        lambda made: made.enable_padding(direction="left", pad_to_multiple_of=64, pad_id=2, pad_token="<pad>"),
    ],
    ids=["truncation", "truncation on the left", "padding", "padding to a multiple"],
)
def test_truncation_and_padding_change_no_tokens(trained, tmp_path, change):
    want = tokenizers.Tokenizer.from_str(trained).encode(TEXT).ids
    found = changed(trained, tmp_path, change)
    assert found.encode(TEXT) == want and found.encode("the") == want[:1]
    (tmp_path / "text").write_text(TEXT)
    np.testing.assert_array_equal(read_tokens(tmp_path / "text", found), want)


def test_dropout_of_merges_has_no_effect(trained, tmp_path):
    content = json.loads(trained)
    content["model"]["dropout"] = 0.9
    (tmp_path / TOKENIZER).write_text(json.dumps(content))
    found = FromFile(tmp_path / TOKENIZER)
    assert found.encode(TEXT) == tokenizers.Tokenizer.from_str(trained).encode(TEXT).ids


def test_a_template_begins_a_text_and_does_not_end_it(trained, tmp_path):
    def with_template(made):
        special = [("<s>", 0), ("</s>", 1)]
        made.post_processor = processors.TemplateProcessing(single="<s> $A </s> </s>", special_tokens=special)
        made.enable_padding(length=64, pad_id=2, pad_token="<pad>")

    found = changed(trained, tmp_path, with_template)
    plain = tokenizers.Tokenizer.from_str(trained)
    assert found.encode("the fox") == [0, *plain.encode("the fox").ids]
    assert found.encode("the</s>") == [0, *plain.encode("the").ids, 1]  # the text's own end token stays
    assert found.decode(found.encode("the fox")) == "the fox"


def test_bytes_that_are_no_utf8(trained, tmp_path):
    prompt = os.fsdecode(b"caf\xe9 \xff")  # as the command line hands them over
    assert Bytes().encode(prompt) == list(b"caf\xe9 \xff")
    found = changed(trained, tmp_path, lambda made: None)
    with pytest.raises(ValueError, match=r"text must be UTF-8, got 'caf\\udce9 \\udcff': remove '\\udce9'"):
        found.encode(prompt)
    (tmp_path / "text").write_bytes(b"the \xff fox")
    with pytest.warns(UserWarning, match="is no UTF-8 at byte 4"):
        tokens = read_tokens(tmp_path / "text", found)
    assert found.decode(tokens) == "the \ufffd fox"
    assert read_tokens(tmp_path / "text", Bytes()).tolist() == list(b"the \xff fox")


@pytest.mark.parametrize("kind", ["a FIFO", "a device", "a directory"])
def test_what_is_no_file_is_an_error_and_no_wait(trained, tmp_path, kind):
    path = tmp_path / TOKENIZER
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    for read in (lambda: read_tokens(path, Bytes()), lambda: FromFile(path), lambda: find_tokenizer(tmp_path, 256)):
        with pytest.raises(OSError, match=f"Not a regular file, but {kind}"):
            read()


def test_a_link_to_no_tokenizer_is_not_taken_for_bytes(tmp_path):
    (tmp_path / TOKENIZER).symlink_to(tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        find_tokenizer(tmp_path, 256)
