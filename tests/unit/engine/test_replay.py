"""A continuation replays its last few tokens; nothing tells it from one that replayed them all."""

from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from services.engine.detokenizer import TextStream
from services.engine.request import SampledToken, SamplingParams, TextGenerated
from tests.unit.engine.tokenizers_of_kinds import KINDS, spell, tokens_of

NUM_PRIOR = 4000


class RecordingTokenizer:
    """Notes what is decoded: how often shows what a replay costs, and with what its context."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.decoded: list[list[int]] = []
        self.token_to_id = tokenizer.token_to_id
        self.id_to_token = tokenizer.id_to_token
        self._decode = tokenizer.decode

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.decoded.append([*ids])
        text: str = self._decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def decoded_for_text(self, start: int = 0) -> list[list[int]]:
        """Without what only told that a token has none."""
        return [ids for ids in self.decoded[start:] if self._decode([ids[-1]] * 2, skip_special_tokens=True)]


def words_of(tokenizer: Tokenizer) -> list[int]:
    """Tokens that are letters whatever stands beside them."""
    names = {name: i for name, i in sorted(tokenizer.get_vocab().items()) if not name.startswith("<")}
    return [i for i in names.values() if tokenizer.decode([i]).strip().isalpha()]


def long_tokens_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Anything, and among it enough plain text to begin a replay in."""
    plain = st.lists(st.sampled_from(words_of(tokenizer)), min_size=1, max_size=12)
    parts = st.lists(st.one_of(plain, tokens_of(tokenizer, most_parts=4)), min_size=2, max_size=8)
    return parts.map(lambda parts: [token_id for part in parts for token_id in part][:60])


@st.composite
def stops_of(draw: st.DrawFn, text: str) -> tuple[str, ...]:
    """Pieces of the text, most of which come to stand at the end of some cut, and some that never come."""
    starts = draw(st.lists(st.integers(0, max(0, len(text) - 1)), max_size=2))
    pieces = [text[start : start + draw(st.integers(1, 20))] for start in starts]
    return (*filter(None, pieces), *draw(st.sampled_from([(), ("no such string",), ("\ufffd",), ("é",)])))


Output = TextGenerated | tuple[SampledToken, ...] | None


def rest_of(stream: TextStream, ids: Sequence[int]) -> list[Output]:
    """All that a stream gives out, in order."""
    rest: list[Output] = []
    for token_id in ids:
        if stream.stopped:
            break
        rest.append(stream.push(SampledToken(token_id)))
    if not stream.stopped:
        rest.append(stream.flush())
    return [*rest, stream.take_textless()]


def check_cuts(tokenizer: Tokenizer, sampling: SamplingParams, ids: list[int]) -> int:
    """Wherever all text has left, a continuation goes on as the undisturbed run did; returns how often.

    What is decoded for it is the same too, so the state is, not only what came of it here.
    """
    recorder = RecordingTokenizer(tokenizer)
    undisturbed = TextStream(cast(Tokenizer, recorder), sampling)
    outputs: list[Output] = []
    cuts = {0: (len(recorder.decoded), False)}  # number of decodings, and whether a stop string has come
    num_shown = 0
    for number, token_id in enumerate(ids, start=1):
        outputs.append(shown := undisturbed.push(SampledToken(token_id)))
        num_shown += len(shown.tokens) if shown else 0
        if num_shown == number:
            cuts[number] = (len(recorder.decoded), undisturbed.stopped)
        if undisturbed.stopped:
            break
    outputs += rest_of(undisturbed, ())
    for cut, (num_decoded, stopped) in cuts.items():
        some = RecordingTokenizer(tokenizer)
        stream = TextStream(cast(Tokenizer, some), sampling, ids[:cut])
        assert stream.stopped == stopped
        some.decoded = []
        assert rest_of(stream, ids[cut:]) == outputs[cut:]
        assert some.decoded_for_text() == recorder.decoded_for_text(num_decoded)
    return len(cuts)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(choose=st.data(), include_stop=st.booleans(), min_tokens=st.sampled_from([0, 0, 1, 5, 20, 45]))
def test_every_cut_goes_on_as_the_undisturbed_run(
    kind: str, choose: st.DataObject, *, include_stop: bool, min_tokens: int
) -> None:
    tokenizer = KINDS[kind]
    ids = choose.draw(long_tokens_of(tokenizer))
    stops = choose.draw(st.one_of(st.just(()), stops_of(tokenizer.decode(ids))))
    sampling = SamplingParams(stop=stops, include_stop=include_stop, min_tokens=min_tokens)
    check_cuts(tokenizer, sampling, ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_broken", range(64, 72))
def test_a_cut_behind_a_run_that_was_given_out_in_parts(kind: str, num_broken: int) -> None:
    """Its tokens count for the context's period like all others."""
    tokenizer = KINDS[kind]
    word = words_of(tokenizer)[0]
    ids = [word] * 5 + spell(tokenizer, "\n") * num_broken + [word] * 12
    assert check_cuts(tokenizer, SamplingParams(), ids) > 12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_textless", range(1, 5))
def test_a_cut_behind_tokens_without_text(kind: str, num_textless: int) -> None:
    """The continuation does not name them again, but they count for the context's period like all others."""
    word = words_of(KINDS[kind])[0]
    end = 10**6
    prior, rest = [*[word] * 8, *[end] * num_textless], [word] * 12
    whole, some = (RecordingTokenizer(KINDS[kind]) for _ in range(2))
    undisturbed = TextStream(cast(Tokenizer, whole), SamplingParams())
    for token_id in prior:
        undisturbed.push(SampledToken(token_id))
    continued = TextStream(cast(Tokenizer, some), SamplingParams(), prior)
    whole.decoded, some.decoded = [], []
    _, *outputs = rest_of(undisturbed, rest)
    first, *others = rest_of(continued, rest)
    assert isinstance(first, TextGenerated)
    assert [token.token_id for token in first.tokens] == [word]
    assert others == outputs
    decoded, expected = (
        [[token_id for token_id in ids if token_id != end] for ids in recorder.decoded_for_text()]
        for recorder in (some, whole)
    )
    assert decoded == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stops", [(), ("a stop string of thirty letters",)], ids=["no stop", "stop"])
@pytest.mark.parametrize("spelled", ["", "é🏃走"], ids=["plain", "bytes"])
def test_what_a_replay_costs_does_not_grow_with_the_reply(
    kind: str, stops: tuple[str, ...], spelled: str
) -> None:
    """Nor where most characters are in bytes, as long as some tokens are whole."""
    period = [*spell(KINDS[kind], spelled), *words_of(KINDS[kind])[:1]]
    prior = (period * NUM_PRIOR)[:NUM_PRIOR]
    tokenizer = RecordingTokenizer(KINDS[kind])
    TextStream(cast(Tokenizer, tokenizer), SamplingParams(stop=stops), prior)
    num_whole = 3 + sum(map(len, stops))
    assert len(tokenizer.decoded) < 4 * len(period) * num_whole + 20


@pytest.mark.parametrize("kind", KINDS)
def test_min_tokens_counts_those_that_are_not_replayed(kind: str) -> None:
    tokenizer = KINDS[kind]
    word = words_of(tokenizer)[0]
    sampling = SamplingParams(stop=(tokenizer.decode([word]),), min_tokens=42)
    stream = TextStream(tokenizer, sampling, [word] * 40)
    stream.push(SampledToken(word))
    assert not stream.stopped
    stream.push(SampledToken(word))
    assert stream.stopped


def test_a_stop_string_well_before_the_end_is_not_looked_for() -> None:
    """No undisturbed run has tokens behind one."""
    tokenizer = KINDS["bytes"]
    sampling = SamplingParams(stop=("cab",))
    assert TextStream(tokenizer, sampling, spell(tokenizer, "b" * 40 + "cab")).stopped
    assert not TextStream(tokenizer, sampling, spell(tokenizer, "cab" + "b" * 40)).stopped


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_without_text_are_not_searched_for_a_place_to_cut(kind: str) -> None:
    """End-of-sequence again and again, as a model gives it that may not end: one decoding for each."""
    end = 10**6  # a model's vocabulary may go beyond its tokenizer's
    tokenizer = RecordingTokenizer(KINDS[kind])
    stream = TextStream(cast(Tokenizer, tokenizer), SamplingParams(ignore_eos=True))
    for _ in range(200):
        assert stream.push(SampledToken(end)) is None
    assert sum(map(len, tokenizer.decoded)) < 10, "the same was found out again and again"
    TextStream(cast(Tokenizer, tokenizer), SamplingParams(ignore_eos=True, stop=("ab",)), [end] * 2000)
    assert sum(map(len, tokenizer.decoded)) < 20


def test_tokens_that_add_no_text_to_others_are_not_searched_for_a_place_to_cut() -> None:
    """WordPiece's bare continuation mark has text at the beginning, and none behind other tokens."""
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##": 2, "##b": 3}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    recorder = RecordingTokenizer(tokenizer)
    ids = [1, *([2] * 400), 3]
    shown = [each for each in rest_of(TextStream(cast(Tokenizer, recorder), SamplingParams()), ids) if each]
    assert "".join(each.text for each in shown if isinstance(each, TextGenerated)) == "ab"
    assert sum(map(len, recorder.decoded)) < len(ids) ** 2, "more than what is pending, once for each token"


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_without_text_among_others_change_nothing(kind: str) -> None:
    tokenizer = KINDS[kind]
    ids = [*words_of(tokenizer)[:3], *spell(tokenizer, "é🏃走"), *words_of(tokenizer)[:1]]
    spread = [each for token_id in ids for each in (token_id, *[10**6] * 40)]
    outputs = rest_of(TextStream(tokenizer, SamplingParams(ignore_eos=True)), spread)
    assert "".join(each.text for each in outputs if isinstance(each, TextGenerated)) == tokenizer.decode(ids)
