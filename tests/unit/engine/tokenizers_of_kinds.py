"""Small tokenizers of the kinds that models have, and tokens of theirs, for tests of detokenizing."""

import itertools

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.engine.sim_model import make_tokenizer

_CONTROL = ("<unk>", "<s>", "</s>")
LETTERS = "abc"
# Every way to cut up texts over the letters, so that tests can place the borders between tokens.
_PIECES = ["".join(letters) for n in (1, 2, 3) for letters in itertools.product(LETTERS, repeat=n)]


def byte_level() -> Tokenizer:
    """As GPT-2's: tokens are bytes, some with parts of two characters in them."""
    alphabet = _byte_alphabet()

    def name(content: bytes) -> str:
        return "".join(alphabet[byte] for byte in content)

    contents = [bytes([byte]) for byte in range(256)]
    contents += [piece.encode() for piece in _PIECES[len(LETTERS) :]]
    contents += [" é".encode()[:2], "éa".encode()[1:], "🏃".encode()[1:3], "走".encode(), "é走".encode()[:3]]
    tokenizer = Tokenizer(models.BPE(vocab={name(c): i for i, c in enumerate(contents)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_control_tokens(tokenizer)


def byte_fallback() -> Tokenizer:
    """As Llama 2's, from SentencePiece BPE: words, a token for each byte, one leading blank less."""
    vocabulary = {word: number for number, word in enumerate(_sentence_pieces())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_control_tokens(tokenizer)


def unigram() -> Tokenizer:
    """From SentencePiece's other model, with the Metaspace decoder and bytes."""
    scores = [(word, -1.0) for word in _sentence_pieces()]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _with_control_tokens(tokenizer)


def _sentence_pieces() -> list[str]:
    words = ("▁", "▁▁", "▁a", "▁relay", "relay", "c▁d", "走", "é", "\ufffd")
    return [*_CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), *words, *_PIECES]


def _byte_alphabet() -> list[str]:
    """A printable name for each byte, as GPT-2's `bytes_to_unicode` gives it."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _with_control_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in _CONTROL])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


def tokens_of(tokenizer: Tokenizer, most_parts: int = 12) -> st.SearchStrategy[list[int]]:
    """Any tokens: half characters, stray bytes, control tokens; whole characters among them."""
    characters = [spell(tokenizer, text) for text in ("é", "🏃", "走", "\n", " a")]
    bytes_of_them = [[token_id] for spelled in characters for token_id in spelled]
    one = st.integers(0, tokenizer.get_vocab_size() - 1).map(lambda token_id: [token_id])
    parts = st.lists(st.one_of(one, st.sampled_from([*characters, *bytes_of_them])), max_size=most_parts)
    return parts.map(lambda parts: [token_id for part in parts for token_id in part])


def spell(tokenizer: Tokenizer, text: str) -> list[int]:
    """Byte by byte where the tokenizer has a token for each."""
    spelled = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    return tokenizer.encode(text, add_special_tokens=False).ids if None in spelled else spelled


KINDS = {"bytes": byte_level(), "fallback": byte_fallback(), "unigram": unigram(), "words": make_tokenizer()}
