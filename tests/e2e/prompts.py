"""Twenty varied prompts as token counts and texts: short, one token, block edges, long, not English."""

PROMPTS: tuple[str, ...] = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three prime numbers.",
    "Explain gravity to a child.",
    "Erkläre kurz, warum der Himmel blau ist.",
    "¿Cuál es la capital de Perú?",
    "请用一句话介绍长城。",
    "日本で一番高い山は何ですか。",
    "Почему трава зелёная?",
    "ما هي عاصمة مصر؟",
    "What do these mean: 🏃‍♀️🏃🏽‍♂️🥇🎽?",
    "def fibonacci(n):\n    # returns the n-th number\n",
    'SELECT name, count(*) FROM runners WHERE club = "Baton" GROUP BY',
    "for (int i = 0; i < n; ++i) { sum += a[i]; }  // what does this do?",
)

# Raw token sequences, beside the texts: (name, number of tokens).
TOKEN_COUNTS: tuple[tuple[str, int], ...] = (
    ("one token", 1),
    ("two tokens", 2),
    ("exactly one block", 16),
    ("exactly four blocks", 64),
    ("one more than two blocks", 33),
    ("1,500 tokens", 1500),
)
