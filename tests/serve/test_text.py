"""Text as it becomes certain: joined, it is the text of all tokens, up to the first stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from forge.data.spelling import spelled
from forge.serve.text import TextStream


@pytest.fixture(scope="module")
def bytes_tokenizer():
    """One token a byte: most characters need several."""
    names = pre_tokenizers.ByteLevel.alphabet()
    inner = Tokenizer(models.BPE({name: i for i, name in enumerate(sorted(names))}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@given(
    text=st.text(alphabet="abcé漢🙂 ", max_size=30),
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=30),
    stop=st.lists(st.text(alphabet="abcé", min_size=1, max_size=3), max_size=2),
)
def test_pieces_join_to_the_text_before_the_first_stop_string(bytes_tokenizer, text, cuts, stop):
    token_ids = bytes_tokenizer(text)["input_ids"]
    stream, said, at = TextStream(bytes_tokenizer, stop), [], 0
    for cut in cuts * len(token_ids):
        if at >= len(token_ids) or stream.stopped:
            break
        said.append(stream.add(token_ids[at : at + cut]))
        at += cut
    said.append(stream.end())
    ends = [(text.find(one) + len(one), text.find(one)) for one in stop if one in text]
    assert "".join(said) == text[: min(ends)[1] if ends else len(text)]
    assert stream.stopped == bool(ends)
    assert not any("\ufffd" in piece for piece in said)


def test_what_may_begin_a_stop_string_is_held_back(bytes_tokenizer):
    stream = TextStream(bytes_tokenizer, ["END"])
    assert stream.add(bytes_tokenizer("so EN")["input_ids"]) == "so "
    assert stream.add(bytes_tokenizer("Q EN")["input_ids"]) == "ENQ "
    assert stream.end() == "EN"


@given(
    text=st.text(alphabet="ab", max_size=40),
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=9), min_size=1, max_size=4),
)
def test_stop_strings_that_overlap_themselves_are_found(bytes_tokenizer, text, stop):
    stream = TextStream(bytes_tokenizer, stop)
    said = [stream.add([token]) for token in bytes_tokenizer(text)["input_ids"]]
    said.append(stream.end())
    ends = [(text.find(one) + len(one), text.find(one)) for one in stop if one in text]
    assert "".join(said) == text[: min(ends)[1] if ends else len(text)]


def test_what_is_held_back_is_the_longest_beginning_of_a_stop_string(bytes_tokenizer):
    stream = TextStream(bytes_tokenizer, ["aab" * 40 + "c"])
    assert stream.add(bytes_tokenizer("x" + "aab" * 40 + "aab")["input_ids"]) == "xaab"
    assert stream.add(bytes_tokenizer("c")["input_ids"]) == ""
    assert stream.stopped


def test_single_tokens_are_told_apart(bytes_tokenizer):
    def told(text):
        return [spelled(bytes_tokenizer, token) for token in bytes_tokenizer(text)["input_ids"]]

    assert told("a \n") == [("a", b"a"), (" ", b" "), ("\n", b"\n")]
    assert told("é") == [(r"bytes:\xc3", b"\xc3"), (r"bytes:\xa9", b"\xa9")]
    assert b"".join(raw for _, raw in told("漢🙂\ufffd\x00\xad")) == "漢🙂\ufffd\x00\xad".encode()
