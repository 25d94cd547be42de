"""``python -m kernelhub`` is the command ``kernelhub``."""

from __future__ import annotations

import sys

from kernelhub.cli.main import main

sys.exit(main())
