"""A tiny tokenizer directory, made on the spot: what a router needs in order to serve a worker without a model."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, END_OF_TURN = "<s>", "</s>", "<|end|>"
SPECIALS = (BOS, EOS, END_OF_TURN)
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def write_tokenizer(directory: Path, *, vocab_size: int, max_model_len: int) -> None:
    """tokenizer.json (bytes, then pairs of letters, then specials), tokenizer_config.json, generation_config.json.

    `vocab_size` counts everything; ValueError if the bytes and specials do not fit.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    room = vocab_size - len(alphabet) - len(SPECIALS)
    if room < 0:
        raise ValueError(f"a vocabulary needs at least {len(alphabet) + len(SPECIALS)} tokens")
    letters = "etaoinshrdlucmfwygpbvkxqjz"
    pairs = [(a, b) for a in "Ġ" + letters for b in letters][:room]
    words = [*alphabet, *(a + b for a, b in pairs)]
    words += [f"<unused{i}>" for i in range(room - len(pairs))]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = {t: tokenizer.token_to_id(t) for t in SPECIALS}
    _dump(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_model_len,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _dump(
        directory / "generation_config.json", {"bos_token_id": ids[BOS], "eos_token_id": [ids[EOS], ids[END_OF_TURN]]}
    )


def _dump(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
