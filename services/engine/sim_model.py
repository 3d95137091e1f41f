"""The simulated model's folder: a small tokenizer, a chat template and the shape of its KV cache.

Everything is made here from rules, so the folder is the same on every machine.
"""

import itertools
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

REPLY_TEXT = (
    "A relay race is a contest in which the runners of one team share the distance and hand a small baton "
    "from one to the next. The first runner starts with the baton in hand and runs as fast as legs allow. "
    "The second one begins to run before the first arrives, reaches back without a look, and takes the baton "
    "inside a short zone. A good exchange costs no time at all, and a bad one can lose the race. Teams "
    "practise it again and again until both hands find each other blindly. The last runner carries the baton "
    "over the line, and the whole team has won together, each by one part of the way."
)
END, START, END_OF_TURN = "<|end|>", "<|start|>", "<|end_of_turn|>"

_NUM_WORDS = 1000
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end_of_turn|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
_CONFIG = {
    "model_type": "baton_sim",
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32768,
}


def write_sim_model(folder: Path) -> None:
    """Writes the folder; overwrites what is there."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    config = _CONFIG | {
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": tokenizer.token_to_id(END),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def words() -> list[str]:
    """The words that a simulated model can say, each a single token with its leading blank."""
    known = dict.fromkeys(word.strip(".,") for word in REPLY_TEXT.split())
    syllables = ["".join(pair) for pair in itertools.product("bdfgklmnprstvz", "aeiou")]
    invented = ("".join(pair) for pair in itertools.product(syllables, syllables))
    return list(itertools.islice(itertools.chain(known, invented), _NUM_WORDS))


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE whose merges build each known word from its leading blank on."""
    blank = "Ġ"  # the byte-level alphabet's name for a blank
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: dict[tuple[str, str], None] = {}
    for word in words():
        prefix = blank
        for letter in word:
            merges[(prefix, letter)] = None
            prefix += letter
            vocabulary.setdefault(prefix, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in (END, START, END_OF_TURN)])
    return tokenizer
