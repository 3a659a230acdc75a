"""The `rayllm` command: a module a subcommand, and how all of them read their options."""
