"""Load for any server that speaks OpenAI's API, and what its callers see of it, in the field's terms."""
