"""A tokenizer of single characters, for models that are made from nothing."""

from __future__ import annotations

from pathlib import Path

from grpo_recipes.errors import UserError

PAD, EOS = "<pad>", "<eos>"


def build_char_tokenizer(alphabet: str, folder: Path, *, ignore_spaces: bool = False) -> None:
    """Write a Hugging Face tokenizer into `folder`: ids 0 <pad>, 1 <eos>, then the characters in the given order.

    A character outside the alphabet cannot be encoded: it is an error, never an unknown token. With `ignore_spaces`
    spaces are dropped before encoding. Decoding joins the characters without spaces. The files are the same bytes each time.

    Raises:
        UserError: the alphabet is empty or repeats a character.
    """
    if not alphabet:
        raise UserError("the alphabet is empty", where="alphabet")
    repeated = sorted({character for character in alphabet if alphabet.count(character) > 1})
    if repeated:
        raise UserError(f"the alphabet repeats {', '.join(map(repr, repeated))}", where="alphabet")
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    if ignore_spaces:
        tokenizer.normalizer = normalizers.Replace(" ", "")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(PAD, special=True), AddedToken(EOS, special=True)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    ).save_pretrained(str(folder))
