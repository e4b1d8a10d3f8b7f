"""Conversations over HTTP: what a stream says is what the whole answer says, in every dialect."""
