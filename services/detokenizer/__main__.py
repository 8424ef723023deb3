"""Run one detokenizer from its MILLRACE_ settings: `python -m services.detokenizer`."""

from services.detokenizer.settings import DetokenizerSettings
from services.detokenizer.worker import BEAT_S, Detokenizer
from shared.runtime import leave, main

if __name__ == "__main__":
    leave(main("detokenizer", DetokenizerSettings, Detokenizer, beat_s=BEAT_S))
