"""Answers a file of requests, a line each as OpenAI's batch API takes them: `penstock batch`."""
