"""Services to start from: each shows one way of using Headrace, and runs as it stands."""
