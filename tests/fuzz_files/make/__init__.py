"""Makes the seeds that follow a rule: `python -m tests.fuzz_files.make`. Templates and texts are written by hand."""
