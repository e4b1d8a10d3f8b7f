"""What things are: models, machines, requests and plans. Frozen dataclasses, standard library only."""
