"""How the services run together: the one-machine stack, its configuration and the command line."""
