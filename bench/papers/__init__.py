"""What the planner predicts for the tables of four papers: their figures as data, a predictor per paper, a page."""
