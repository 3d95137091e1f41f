"""Text leaves whole, never a part of a stop string, and a replay lands exactly where the run stood."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.engine.detokenizer import TextStream
from services.engine.request import SampledToken, SamplingParams, TextGenerated
from services.engine.sim_model import make_tokenizer

TOKENIZER: Tokenizer = make_tokenizer()


def run(text: str, **sampling: object) -> tuple[list[TextGenerated], tuple[SampledToken, ...], bool]:
    """Pushes the tokens of a text; what was shown, what stayed without text, whether a stop ended it."""
    stream = TextStream(TOKENIZER, SamplingParams(**sampling))  # type: ignore[arg-type]
    shown = []
    for token_id in TOKENIZER.encode(text).ids:
        if piece := stream.push(SampledToken(token_id)):
            shown.append(piece)
        if stream.stopped:
            break
    if not stream.stopped and (rest := stream.flush()):
        shown.append(rest)
    return shown, stream.take_textless(), stream.stopped


def joined(shown: list[TextGenerated]) -> str:
    return "".join(piece.text for piece in shown)


@pytest.mark.parametrize(
    "text", ["plain words", "日本で一番高い山", "🏃‍♀️🏃🏽‍♂️", "naïve café — “quoted”", "a\u2028b"]
)
def test_text_comes_out_whole(text: str) -> None:
    shown, rest, _ = run(text)
    assert joined(shown) == text
    assert "\ufffd" not in joined(shown)
    assert all(piece.text for piece in shown)
    assert rest == ()


def test_half_a_character_is_never_shown() -> None:
    ids = TOKENIZER.encode("é🏃").ids
    stream = TextStream(TOKENIZER, SamplingParams())
    shown = [stream.push(SampledToken(token_id)) for token_id in ids[:-1]]
    assert [piece.text for piece in shown if piece] == ["é"]
    assert stream.flush() is None
    assert len(stream.take_textless()) == len(ids) - 3


@given(st.text(alphabet="abEND ", max_size=30), st.sampled_from(["END", "ab", "D a", " "]))
def test_a_stop_string_cuts_exactly_where_a_search_of_the_whole_would(text: str, stop: str) -> None:
    shown, _, stopped = run(text, stop=(stop,))
    before, found, _ = text.partition(stop)
    assert joined(shown) == before
    assert stopped == bool(found)


def test_include_stop_keeps_it() -> None:
    shown, _, _ = run("one two STOP three", stop=("STOP",), include_stop=True)
    assert joined(shown) == "one two STOP"


def test_stop_strings_do_not_count_below_min_tokens() -> None:
    shown, _, stopped = run("xxSTOPyySTOPzz", stop=("STOP",), min_tokens=8)
    assert stopped
    assert joined(shown) == "xxSTOPyy"


@settings(deadline=None)
@given(st.text(alphabet="abEND é🏃", min_size=1, max_size=25), st.sampled_from([(), ("END",), ("ab", "ND ")]))
def test_a_continuation_from_any_delta_shows_the_rest(text: str, stop: tuple[str, ...]) -> None:
    whole, _, stopped = run(text, stop=stop)
    ids = TOKENIZER.encode(text).ids
    for cut in range(1, len(whole) + 1):
        prior = [token.token_id for piece in whole[:cut] for token in piece.tokens]
        stream = TextStream(TOKENIZER, SamplingParams(stop=stop), prior)
        again = []
        for token_id in ids[len(prior) :]:
            if stream.stopped:
                break
            if piece := stream.push(SampledToken(token_id)):
                again.append(piece)
        if not stream.stopped and (last := stream.flush()):
            again.append(last)
        assert joined(whole[:cut]) + joined(again) == joined(whole)
        assert stream.stopped == stopped


def test_every_token_is_named_once() -> None:
    shown, rest, _ = run("a relay END b", stop=("END",))
    named = [token.token_id for piece in shown for token in piece.tokens] + [t.token_id for t in rest]
    ids = TOKENIZER.encode("a relay END b").ids
    assert named == ids[: len(named)]
    assert TOKENIZER.decode(named) == "a relay END"
