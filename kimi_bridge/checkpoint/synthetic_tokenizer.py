"""A real byte-level BPE tokenizer for any vocabulary size, with the published special tokens."""

from __future__ import annotations

import itertools
from pathlib import Path

from kimi_bridge.checkpoint.files import write_json, write_text
from kimi_bridge.errors import CheckpointError

SPECIAL_TOKENS = 256
BYTE_TOKENS = 256

# By distance from the end of the vocabulary; the ids between them are reserved, as published.
_NAMES_FROM_END = {
    256: "[BOS]",
    255: "[EOS]",
    254: "<|im_end|>",
    253: "<|im_user|>",
    252: "<|im_assistant|>",
    247: "[EOT]",
    246: "<|im_system|>",
    239: "<|im_middle|>",
    238: "<|media_begin|>",
    237: "<|media_content|>",
    236: "<|media_end|>",
    235: "<|media_pad|>",
    234: "<think>",
    233: "</think>",
    2: "[UNK]",
    1: "[PAD]",
}

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_{{ message.role }}|>{{ message.role }}<|im_middle|>
{%- if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}
{{ part.text }}
{%- else -%}
<|media_begin|>{{ part.type | replace('_url', '') }}<|media_content|><|media_pad|><|media_end|>
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|>
{%- endif -%}
"""


# PreTrainedTokenizerFast is known to transformers 4 and 5 alike.
_TOKENIZER_CONFIG = {
    "bos_token": "[BOS]",
    "clean_up_tokenization_spaces": False,
    "eos_token": "[EOS]",
    "model_max_length": 262144,
    "pad_token": "[PAD]",
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": "[UNK]",
}


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja.

    Every id below `vocab_size` is a token: 256 bytes, pairs of bytes, and 256 special tokens at the end.
    Raises CheckpointError for a vocabulary too small for that, or too large for pairs.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # type: ignore

    pairs = vocab_size - SPECIAL_TOKENS - BYTE_TOKENS
    if not 0 <= pairs <= BYTE_TOKENS**2:
        raise CheckpointError(
            f"vocab_size is {vocab_size}: choose {SPECIAL_TOKENS + BYTE_TOKENS} to "
            f"{SPECIAL_TOKENS + BYTE_TOKENS + BYTE_TOKENS**2}."
        )
    merges = _frequent_pairs(sorted(pre_tokenizers.ByteLevel.alphabet()), pairs)
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = [
        _NAMES_FROM_END.get(back, f"<|reserved_token_{vocab_size - back}|>")
        for back in range(SPECIAL_TOKENS, 0, -1)
    ]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True) + "\n")
    write_json(folder / "tokenizer_config.json", _TOKENIZER_CONFIG)
    write_text(folder / "chat_template.jinja", CHAT_TEMPLATE)


def _frequent_pairs(alphabet: list[str], count: int) -> list[tuple[str, str]]:
    """Pairs of byte tokens, those of frequent English letters first."""
    frequent = "\u0120etaoinshrdlucmfwypvbgkjqxz"
    order = list(frequent) + [token for token in alphabet if token not in frequent]
    ranked = sorted(
        ((left + right, left, right) for left, right in itertools.product(range(len(order)), repeat=2))
    )
    return [(order[left], order[right]) for _, left, right in ranked[:count]]
