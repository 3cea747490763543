"""Run `python -m glax.cli`."""

import sys

from glax.cli import main

sys.exit(main())
