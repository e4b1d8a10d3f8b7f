"""What a server gives whose weights stream: `python -m bench.serve`."""
