"""What `headrace trace` and `headrace top` look at."""
