"""The papers' mathematics: numbers in, numbers out. Nothing here knows plans or tasks. `planner/solve` puts the numbers
in, and makes plans of the answers."""
