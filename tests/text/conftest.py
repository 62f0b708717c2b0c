"""Real tokenizers of each kind, trained on a few sentences."""

import json

import pytest

SENTENCES = [
    "The sky is blue. The sky is not green.",
    "I was singing in the rain, and it was good!",
    "A café in Seoul: 한국어, and 😀 too.",
] * 20


@pytest.fixture(scope="session")
def tokenizers():
    """By name; in `sentencepiece`, as in Llama's, unknown characters are bytes and the first space is dropped."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    ends = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    special = list(ends.values())

    llama = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    llama.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    llama.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    llama.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    llama.train_from_iterator(
        SENTENCES[:2] * 9, trainers.BpeTrainer(vocab_size=300, special_tokens=[*special, *alphabet])
    )
    written = json.loads(llama.to_str())
    written["added_tokens"] = [token for token in written["added_tokens"] if token["content"] in special]
    llama = Tokenizer.from_str(json.dumps(written))

    unigram = Tokenizer(models.Unigram())
    unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    unigram.train_from_iterator(
        SENTENCES, trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>")
    )

    wordpiece = Tokenizer(models.WordPiece(unk_token="<unk>"))
    wordpiece.pre_tokenizer, wordpiece.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    wordpiece.train_from_iterator(SENTENCES, trainers.WordPieceTrainer(vocab_size=90, special_tokens=special))

    bytes_ = Tokenizer(models.BPE())
    bytes_.pre_tokenizer, bytes_.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bytes_.train_from_iterator(SENTENCES, trainer)

    made = {"sentencepiece": llama, "unigram": unigram, "wordpiece": wordpiece, "bytes": bytes_}
    return {name: PreTrainedTokenizerFast(tokenizer_object=one, **ends) for name, one in made.items()}
