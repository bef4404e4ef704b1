"""Translate: words of numbers, vocabularies, and what a tokenisation loses."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from harness.evaluate import read_lengths, score_reading
from harness.schema import UserError
from harness.spec import ModelSpec, RunSpec
from tasks import BPE, Characters, Lengths, Translate, Words
from tasks.task import BOS, EOS, FIRST_SYMBOL, IGNORED, PAD, SEP
from tasks.translate import spelled

CPU = torch.device("cpu")
SHORT = Lengths(train=(1, 2), test=(3,))
TOKENISATIONS = [BPE(), Words(), Characters()]
kinds = pytest.mark.parametrize("tokenisation", TOKENISATIONS, ids=lambda level: level.kind)
UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
)
NUMBERS = {word: n for n, word in enumerate([*UNITS.split(), "eighteen", "nineteen"])}
DECADES = "twenty thirty forty fifty sixty seventy eighty ninety"
TENS = {word: 10 * n for n, word in enumerate(DECADES.split(), 2)}


def read(text: str) -> int:
    """An English number below 1000, by hand."""
    total = 0
    for word in text.replace(" and ", " ").split():
        total = total * 100 if word == "hundred" else total + (NUMBERS | TENS)[word]
    return total


def text_of(task: Translate, row: list[int]) -> str:
    return task.vocabulary.decode([token - FIRST_SYMBOL for token in row if token != PAD])


@kinds
def test_the_answer_is_the_same_number_in_the_other_language(tokenisation: BPE | Words | Characters) -> None:
    task = Translate(lengths=Lengths(train=(1, 3), test=()), tokenisation=tokenisation)
    for length in (1, 2, 3):
        source, answer = task.sample(40, length, torch.Generator().manual_seed(length))
        for asked, wanted in zip(source.tolist(), answer.tolist(), strict=True):
            number = read(text_of(task, asked))
            assert len(str(number)) == length
            assert text_of(task, wanted) == spelled(number, "de")
            assert task.oracle([token for token in asked if token]) == [token for token in wanted if token]
        assert torch.equal(task.answer(source), answer[:, : task.answer(source).shape[1]])


@kinds
def test_every_number_of_a_length_is_equally_likely(tokenisation: BPE | Words | Characters) -> None:
    task = Translate(lengths=SHORT, tokenisation=tokenisation)
    drawn = [text_of(task, row) for row in task.source(5000, 1, torch.Generator().manual_seed(0)).tolist()]
    counts = {text: drawn.count(text) for text in set(drawn)}
    assert len(counts) == task.space(1) == 10
    assert all(abs(n - 500) < 110 for n in counts.values())
    assert task.space(2) == 90


def test_sequences_close_up_and_padding_comes_last() -> None:
    task = Translate(lengths=SHORT)
    batch = task.batch(0, "train", 0, 16, 2, CPU)
    assert batch.real is not None
    for read_, wanted, real in zip(batch.inputs.tolist(), batch.targets.tolist(), batch.real.tolist(), strict=True):
        width = sum(real)
        assert real == [True] * width + [False] * (len(real) - width)
        assert read_[width:] == [PAD] * (len(real) - width)
        source = read_[1 : read_.index(SEP)]
        assert read_[0] == BOS
        assert [token for token in wanted if token != IGNORED] == [*task.oracle(source), EOS]
    both = task.batch(0, "train", 0, 16, 2, CPU, "translate")
    assert both.source is not None
    assert both.source_real is not None
    assert torch.equal(both.source_real, both.source != PAD)
    first = [token for token in both.source[0].tolist() if token]
    assert first[-1] == EOS
    assert [token for token in both.targets[0].tolist() if token != IGNORED] == [*task.oracle(first[:-1]), EOS]


def test_one_sequence_cut_out_of_a_batch_is_the_same_without_padding() -> None:
    batch = Translate(lengths=SHORT).batch(0, "train", 0, 4, 2, CPU, "translate")
    for row, alone in enumerate(batch.unpadded()):
        assert alone.reading[2:] == ()
        assert alone.source is not None
        width, source_width = alone.inputs.shape[1], alone.source.shape[1]
        assert torch.equal(alone.inputs[0], batch.inputs[row, :width])
        assert batch.real is not None
        assert int(batch.real[row].sum()) == width
        assert int(batch.source_real[row].sum()) == source_width  # type: ignore[index]


# --- tokenisations ---------------------------------------------------------------------------------------------------


@given(st.text())
def test_bpe_on_bytes_knows_every_text(text: str) -> None:
    # CLAIMS D08: "no OOV" needs bytes.
    vocabulary = Translate(lengths=SHORT).vocabulary
    assert vocabulary.decode(vocabulary.encode(text)) == text


def test_bpe_merges_what_is_frequent_and_keeps_what_is_not() -> None:
    # CLAIMS D08: "lower" after "low" is frequent becomes low + the rest, where the article's code gives lower + </w>.
    vocabulary = BPE(vocab_size=258).train(["low low low low low"])
    assert vocabulary.size == 258
    assert [vocabulary.token(n) for n in vocabulary.encode("lower")] == ["low", "e", "r"]
    assert vocabulary.decode(vocabulary.encode("lower")) == "lower"


def test_a_vocabulary_has_its_size_and_no_more() -> None:
    assert BPE(vocab_size=300).train([spelled(n, "en") for n in range(200)]).size == 300
    assert Translate(lengths=SHORT, tokenisation=BPE(vocab_size=290)).vocab_size == FIRST_SYMBOL + 290


def test_words_lose_what_they_do_not_know_and_characters_are_long() -> None:
    # CLAIMS D20
    text = [spelled(n, "en") for n in range(30)]
    words, characters, pairs = Words().train(text), Characters().train(text), BPE(vocab_size=300).train(text)
    assert words.decode(words.encode("twenty hundred")) == "twenty UNK"
    known = "twenty seven"
    assert words.decode(words.encode(known)) == characters.decode(characters.encode(known)) == known
    assert len(characters.encode(known)) == len(known) > len(pairs.encode(known)) >= len(words.encode(known)) == 2


@kinds
def test_a_vocabulary_is_the_same_in_every_process(tokenisation: BPE | Words | Characters) -> None:
    made = f"Translate(lengths=Lengths(train=(1, 2), test=(3,)), tokenisation={tokenisation.kind}())"
    command = [sys.executable, "-c", f"from tasks import *; t = {made}; print(*map(t.label, range(t.vocab_size)))"]
    seen = {subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)}
    task = Translate(lengths=SHORT, tokenisation=tokenisation)
    assert seen == {" ".join(map(task.label, range(task.vocab_size))) + "\n"}


def test_what_cannot_be_translated_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        Translate(lengths=Lengths(train=(1, 3), test=(9,)))
    assert "numbers have up to 5 digits; choose shorter lengths" in str(caught.value)
    with pytest.raises(UserError) as caught:
        Translate(to_language="en")
    assert "to_language = 'en' is the source's; choose another" in str(caught.value)


@pytest.mark.parametrize(("number", "language", "words"), [(42, "en", "forty two"), (42, "de", "zweiundvierzig")])
def test_numbers_in_words(number: int, language: str, words: str) -> None:
    assert spelled(number, language) == words  # type: ignore[arg-type]


def test_an_answer_that_the_vocabulary_lacks_is_never_right() -> None:
    task = Translate(lengths=Lengths(train=(4, 4), test=()), tokenisation=Words())
    spec = RunSpec(model=ModelSpec(d_model=8, num_heads=1, num_layers=1), task=task)
    batch = spec.batch("eval", 0, 64, 4, torch.device("cpu"))
    lacking = (batch.targets == task.unknown).any(dim=1)
    assert 0 < int(lacking.sum()) < 64
    perfect = functional.one_hot(batch.targets.clamp(min=0), task.vocab_size).float()
    (reading,) = read_lengths(lambda *_: perfect, spec, [4], stream="eval", samples=64).values()
    assert reading is not None
    assert score_reading(reading)["exact_match"] == 1 - lacking.double().mean().item()
    assert Translate().unknown is None
