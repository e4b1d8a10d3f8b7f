"""Answers prompts with a model: plans it, loads it, runs passes, samples tokens. Planner and runtime meet here."""
