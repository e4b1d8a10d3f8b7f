"""What the model types share: typed reading of `config.json`, rope, the llama-like decoder, tensor names."""
