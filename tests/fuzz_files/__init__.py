"""A fuzzer of every file that penstock reads: seeds, mutations, and the command line's `main` in forked children.

The environment is set before anything imports numpy: its BLAS would start a thread in each child, which spins; these
took 20 % of all processor time.
"""

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"
