"""A fuzzer of every file that penstock reads: seeds, mutations, and the command line's `main` in forked children."""
