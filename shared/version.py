"""The version of the project, as pyproject.toml has it; a test keeps the two equal."""

from typing import Final

VERSION: Final = "0.1.0"
