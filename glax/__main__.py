"""Run `python -m glax`, which is the command `glax`."""

import sys

from glax_cli import main

sys.exit(main())
