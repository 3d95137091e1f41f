"""Small tokenizers of the kinds that models have, for tests of detokenizing."""

import itertools

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

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
