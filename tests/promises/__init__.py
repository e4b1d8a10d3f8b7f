"""Plans of real shapes for real machines promise nothing absurd: more memory is no slower, what refusals name works."""
