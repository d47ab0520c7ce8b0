"""`python -m adafactor`: the same as the command `adafactor`."""

import sys

from adafactor.cli import main

sys.exit(main())
