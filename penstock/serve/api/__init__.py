"""The OpenAI-compatible server: HTTP in front of a `Service`."""
