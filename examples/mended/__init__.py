"""A task that an audit finds a flaw in, trained with the flaw and without it."""
