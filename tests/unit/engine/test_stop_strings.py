"""Stop strings, however they lie over tokens: nothing of them is shown, and what is shown is all the rest."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.engine.detokenizer import TextStream
from services.engine.request import SampledToken, SamplingParams, TextGenerated
from tests.unit.engine.tokenizers_of_kinds import LETTERS, byte_fallback, byte_level, unigram

KINDS = {"bytes": byte_level(), "fallback": byte_fallback(), "unigram": unigram()}
# Each piece is one token, or one for each of its bytes: borders, and halves, are everywhere.
PIECES = st.lists(
    st.tuples(st.one_of(st.text(LETTERS, min_size=1, max_size=3), st.just("é")), st.booleans()), max_size=14
)
STOPS = st.lists(st.text(f"{LETTERS}é", min_size=1, max_size=5), min_size=1, max_size=3)


@dataclass
class Cut:
    """What characters that come one by one lead to: the text shown, and whether a stop string ended it."""

    text: str
    stopped: bool


def cut(text: str, sampling: SamplingParams, num_exempt: int) -> Cut:
    """A stop string begins behind the exempt characters; the first that is complete ends the text."""
    for end in range(num_exempt + 1, len(text) + 1):
        complete = [stop for stop in sampling.stop if text[num_exempt:end].endswith(stop)]
        if complete:
            start = end - max(map(len, complete))
            return Cut(text[: end if sampling.include_stop else start], stopped=True)
    return Cut(text, stopped=False)


def spell(tokenizer: Tokenizer, pieces: list[tuple[str, bool]]) -> list[tuple[int, bytes]]:
    """Token IDs and what each stands for."""
    tokens = []
    for text, is_spelled in pieces:
        content = text.encode()
        whole = tokenizer.token_to_id(text)
        if whole is not None and tokenizer.decode([whole]) == text and not is_spelled:
            tokens.append((whole, content))
            continue
        for byte in content:
            token_id = tokenizer.token_to_id(f"<0x{byte:02X}>")
            tokens.append((byte if token_id is None else token_id, bytes([byte])))
    return tokens


def text_of(tokens: list[tuple[int, bytes]]) -> str:
    """Whole characters only."""
    return b"".join(content for _, content in tokens).decode(errors="ignore")


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=300)
@given(pieces=PIECES, stops=STOPS, include_stop=st.booleans(), min_tokens=st.sampled_from([0, 0, 1, 2, 5, 9]))
def test_the_cut_is_where_it_would_be_character_by_character(
    kind: str, pieces: list[tuple[str, bool]], stops: list[str], *, include_stop: bool, min_tokens: int
) -> None:
    tokens = spell(KINDS[kind], pieces)
    sampling = SamplingParams(stop=tuple(stops), include_stop=include_stop, min_tokens=min_tokens)
    num_exempt = len(text_of(tokens[: max(0, min_tokens - 1)]))
    counts = range(max(1, min_tokens), len(tokens) + 1)
    cuts = [cut(text_of(tokens[:count]), sampling, num_exempt) for count in counts]
    num_taken = next((n for n, c in zip(counts, cuts, strict=True) if c.stopped), len(tokens))
    expected = next((c for c in cuts if c.stopped), Cut(text_of(tokens), stopped=False))

    stream = TextStream(KINDS[kind], sampling)
    shown: list[TextGenerated] = []
    for number, (token_id, _) in enumerate(tokens):
        assert number < num_taken, "it goes on behind a stop string"
        if piece := stream.push(SampledToken(token_id)):
            shown.append(piece)
        if stream.stopped:
            assert number + 1 == num_taken
            break
    if not stream.stopped and (rest := stream.flush()):
        shown.append(rest)

    assert stream.stopped == expected.stopped
    assert "".join(piece.text for piece in shown) == expected.text
    assert all(piece.text for piece in shown)
    named = [token.token_id for piece in shown for token in piece.tokens]
    named += [token.token_id for token in stream.take_textless()]
    assert named == [token_id for token_id, _ in tokens[:num_taken]]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=150)
@given(pieces=PIECES, stops=STOPS, include_stop=st.booleans(), min_tokens=st.sampled_from([0, 2, 5, 9]))
def test_a_continuation_from_any_delta_cuts_at_the_same_place(
    kind: str, pieces: list[tuple[str, bool]], stops: list[str], *, include_stop: bool, min_tokens: int
) -> None:
    ids = [token_id for token_id, _ in spell(KINDS[kind], pieces)]
    sampling = SamplingParams(stop=tuple(stops), include_stop=include_stop, min_tokens=min_tokens)

    def run(prior: list[int]) -> tuple[list[TextGenerated], bool]:
        stream = TextStream(KINDS[kind], sampling, prior)
        shown = []
        for token_id in ids[len(prior) :]:
            if stream.stopped:
                break
            if piece := stream.push(SampledToken(token_id)):
                shown.append(piece)
        if not stream.stopped and (rest := stream.flush()):
            shown.append(rest)
        return shown, stream.stopped

    whole, stopped = run([])
    for number in range(1, len(whole)):
        prior = [token.token_id for piece in whole[:number] for token in piece.tokens]
        rest, rest_stopped = run(prior)
        assert (whole[:number] + rest, rest_stopped) == (whole, stopped)


@pytest.mark.parametrize(
    ("stops", "text", "shown"),
    [
        (("ab", "abc"), "cabc", "c"),  # one is the other's beginning: the short one is complete first
        (("bc", "abc"), "cabc", "c"),  # both are complete at once: nothing of the longer one is shown
        (("abcc", "b"), "cabcc", "ca"),  # the one that began first comes too late
    ],
)
@pytest.mark.parametrize("is_spelled", [False, True])
def test_stop_strings_that_overlap(
    stops: tuple[str, ...], text: str, shown: str, *, is_spelled: bool
) -> None:
    tokenizer = KINDS["fallback"]
    stream = TextStream(tokenizer, SamplingParams(stop=stops))
    pieces = [(text[:3], is_spelled), (text[3:], is_spelled)]
    texts = [
        piece.text
        for token_id, _ in spell(tokenizer, pieces)
        if not stream.stopped and (piece := stream.push(SampledToken(token_id)))
    ]
    assert stream.stopped
    assert "".join(texts) == shown
