"""Models as wide as real ones: a row's logits are the same whatever goes through the model beside it."""
