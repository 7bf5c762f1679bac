"""Tokenizers from local folders."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_recipes.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(folder: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer that transformers finds in `folder`; nothing is downloaded.

    Raises:
        UserError: the folder is missing, holds no readable tokenizer, wants its own code run without being trusted, or
            has a tokenizer without an end-of-sequence token.
    """
    folder = Path(folder).expanduser()
    where = str(folder)
    if not folder.is_dir():
        raise UserError("no such folder", where=where, mend="set policy.tokenizer.name to a tokenizer's folder")
    if not trust_remote_code and _wants_own_code(folder):
        raise UserError(
            "the tokenizer wants code from its folder run",
            where=where,
            mend="read that code, then set policy.trust_remote_code=true",
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(where, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raises bare Exception for a damaged tokenizer.json
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        mend = "the folder needs tokenizer.json and tokenizer_config.json; copy it again"
        raise UserError(f"no readable tokenizer: {first_line}", where=where, mend=mend) from error
    if tokenizer.eos_token_id is None:
        mend = "set eos_token in tokenizer_config.json"
        raise UserError("the tokenizer has no end-of-sequence token", where=where, mend=mend)
    return tokenizer


def _wants_own_code(folder: Path) -> bool:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return False
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return "AutoTokenizer" in config.get("auto_map", {})
    except (ValueError, AttributeError) as error:
        raise UserError(f"not a JSON object: {error}", where=str(path), mend="copy the file again") from error


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of what turns text into ids and back. Padding and truncation, which callers may set, do not count."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content.update(padding=None, truncation=None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def chat_template_digest(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """SHA-256 of the chat template; None without one."""
    template = tokenizer.chat_template
    return None if template is None else hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()
