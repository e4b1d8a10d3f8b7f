import sys

from penstock.cli.entry import main

sys.exit(main())
