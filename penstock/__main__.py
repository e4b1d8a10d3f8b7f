"""`python -m penstock`: the command line, as the console script `penstock` and `python -m penstock.cli` run it."""

import sys

from penstock.cli.entry import main

sys.exit(main())
