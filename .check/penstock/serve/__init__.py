"""Where planner and runtime meet: engine, sampling, tokenizer, evaluation."""
