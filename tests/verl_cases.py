"""What the tests of verl's scripts share."""

import os
from pathlib import Path

from hypothesis import strategies as st

SCRIPTS = Path(__file__).parent / "verl_scripts"
ENVIRONMENT = {"HOME": "/home/me", "PATH": os.environ["PATH"]}
ANY_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=40)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | ANY_TEXT
