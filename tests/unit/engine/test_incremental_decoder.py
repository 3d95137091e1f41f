"""Whatever the tokens and the tokenizer: joined deltas are what decoding everything at once gives."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.engine.detokenizer import TextStream
from services.engine.request import SampledToken, SamplingParams, TextGenerated
from tests.unit.engine.tokenizers_of_kinds import KINDS, spell, tokens_of

HALF = "\ufffd"


def shown_of(
    tokenizer: Tokenizer, ids: list[int], prior: list[int]
) -> tuple[list[TextGenerated], tuple[SampledToken, ...]]:
    """Deltas, and the tokens that got none."""
    stream = TextStream(tokenizer, SamplingParams(), prior)
    shown = [piece for token_id in ids if (piece := stream.push(SampledToken(token_id)))]
    if rest := stream.flush():
        shown.append(rest)
    return shown, stream.take_textless()


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=150)
@given(choose=st.data())
def test_deltas_are_the_text_of_all_tokens(kind: str, choose: st.DataObject) -> None:
    tokenizer = KINDS[kind]
    ids = choose.draw(tokens_of(tokenizer))
    shown, textless = shown_of(tokenizer, ids, [])
    assert all(piece.text and piece.tokens for piece in shown), "an empty delta"
    named = [token.token_id for piece in shown for token in piece.tokens]
    assert [*named, *(token.token_id for token in textless)] == ids
    text = "".join(piece.text for piece in shown)
    # At the end half a character may be missing: tokens without text, or a part of the last one.
    whole = {tokenizer.decode(named), tokenizer.decode(named).rstrip(HALF)}
    assert text in whole
    missing = [token_id for token_id in (t.token_id for t in textless) if tokenizer.decode([token_id])]
    assert len(missing) <= 3
    assert set(tokenizer.decode(ids).removeprefix(text)) <= {HALF} or missing


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=100)
@given(choose=st.data())
def test_a_continuation_from_any_delta_shows_the_same(kind: str, choose: st.DataObject) -> None:
    tokenizer = KINDS[kind]
    ids = choose.draw(tokens_of(tokenizer))
    whole, textless = shown_of(tokenizer, ids, [])
    for cut in range(1, len(whole)):
        prior = [token.token_id for piece in whole[:cut] for token in piece.tokens]
        rest, rest_textless = shown_of(tokenizer, ids[len(prior) :], prior)
        assert (whole[:cut] + rest, rest_textless) == (whole, textless)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(text=st.text(alphabet="ab é走🏃\n", max_size=20))
def test_valid_text_comes_out_whole_and_no_character_in_parts(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    ids = spell(tokenizer, text)
    shown, textless = shown_of(tokenizer, ids, [])
    assert "".join(piece.text for piece in shown) == tokenizer.decode(ids)
    assert HALF not in tokenizer.decode(ids)
    assert all(not tokenizer.decode([token.token_id]) for token in textless)


@pytest.mark.parametrize("kind", ["bytes", "fallback", "unigram"])
@pytest.mark.parametrize("unit", ["\n", "é", "🏃", "ab\n🏃", None])
def test_a_long_run_of_bytes_is_not_held_to_its_end(kind: str, unit: str | None) -> None:
    """Else a reply that repeats a line end for ever would show nothing, and cost more with every token."""
    tokenizer = KINDS[kind]
    ids = spell(tokenizer, "a" + unit * 200) if unit else [*spell(tokenizer, "a"), *([255] * 300)]
    stream = TextStream(tokenizer, SamplingParams())
    pieces = [stream.push(SampledToken(token_id)) for token_id in ids]
    named = [token for piece in pieces if piece for token in piece.tokens]
    assert len(ids) - len(named) <= 64
    shown, _ = shown_of(tokenizer, ids, [])
    assert "".join(piece.text for piece in shown) == tokenizer.decode(ids)


def test_a_control_token_within_a_character_does_not_part_it() -> None:
    tokenizer = KINDS["fallback"]
    first, second = spell(tokenizer, "é")
    shown, _ = shown_of(tokenizer, [first, tokenizer.token_to_id("<s>"), second], [])
    assert [piece.text for piece in shown] == ["é"]


def test_a_wrong_byte_undoes_those_before_it_as_in_decoding_all_at_once() -> None:
    tokenizer = KINDS["fallback"]
    names = ("<0x0F>", "<0xF2>", "<0xD6>", "▁relay")
    ids = [tokenizer.token_to_id(name) for name in names]
    shown, _ = shown_of(tokenizer, ids, [])
    assert "".join(piece.text for piece in shown) == tokenizer.decode(ids) == "��� relay"
