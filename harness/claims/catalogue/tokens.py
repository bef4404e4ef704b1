"""Claims about tokenisation."""

from harness.claims.rules import Claim, Compared, Law, tests

CLAIMS = (
    Claim(
        id="D08",
        where="de 1.1",
        sentence="The printed BPE encodes “lower” as low, er, </w>, and no word is out of vocabulary.",
        right="The printed code gives lower, </w>; trained on “low” alone BPE gives low, e, r. Nothing is out of "
        "vocabulary if the symbols are bytes.",
        settled_by=(
            Law(
                of="what is not frequent is not merged",
                tests=tests("tasks/test_translate", "test_bpe_merges_what_is_frequent_and_keeps_what_is_not"),
                refutes=True,
            ),
            Law(
                of="on bytes every text is known",
                tests=tests("tasks/test_translate", "test_bpe_on_bytes_knows_every_text"),
            ),
        ),
    ),
    Claim(
        id="D20",
        where="de 1.1",
        sentence="Subwords do better than words, which are out of vocabulary, and characters, which are long.",
        settled_by=(
            Compared(of="words are worse", study="tokenisation", variant="words", expects="worse"),
            Compared(of="characters are worse", study="tokenisation", variant="characters", expects="worse"),
            Law(
                of="words are lost and characters are long",
                tests=tests("tasks/test_translate", "test_words_lose_what_they_do_not_know_and_characters_are_long"),
            ),
        ),
    ),
)
