"""Run one tokenizer from its `MILLRACE_*` settings: `python -m services.tokenizer`."""

from services.tokenizer.service import TokenizerService
from services.tokenizer.settings import TokenizerSettings
from shared.runtime import leave, main

if __name__ == "__main__":
    leave(main("tokenizer", TokenizerSettings, TokenizerService, watch=["scheduler"]))
