"""The commands, one file each: they parse arguments and print. Nothing heavy is imported before a command runs."""
