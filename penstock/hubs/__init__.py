"""Models that others keep: on the Hub, and on this machine by Ollama and LM Studio."""
