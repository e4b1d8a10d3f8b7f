"""Tools that a model may call: how templates write calls, a grammar that holds answers to it, and what answers say."""
