"""Run one detokenizer from its MILLRACE_ settings: `python -m services.detokenizer`."""

import sys

from services.detokenizer.settings import DetokenizerSettings
from services.detokenizer.worker import BEAT_S, Detokenizer
from shared.runtime import main

if __name__ == "__main__":
    sys.exit(main("detokenizer", DetokenizerSettings, Detokenizer, beat_s=BEAT_S))
