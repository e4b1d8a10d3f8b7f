"""One file per command: argument parsing and printing only. Nothing heavy is imported before a command runs."""
