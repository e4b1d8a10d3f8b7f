"""Penstock's own plans: what fits stays in RAM and the rest streams (`ram`); beside a device (`device`)."""
