"""Run one tokenizer from its `MILLRACE_*` settings: `python -m services.tokenizer`."""

import sys

from services.tokenizer.service import TokenizerService
from services.tokenizer.settings import TokenizerSettings
from shared.runtime import main

if __name__ == "__main__":
    sys.exit(main("tokenizer", TokenizerSettings, TokenizerService, watch=["scheduler"]))
