"""Other APIs than OpenAI's, as thin adapters: a body becomes an `AskedChat`, and a `Form` writes the answers down."""
