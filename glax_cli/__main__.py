"""Run `python -m glax_cli`."""

import sys

from glax_cli import main

sys.exit(main())
