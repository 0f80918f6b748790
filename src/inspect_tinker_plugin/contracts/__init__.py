"""The vocabulary of the package: requests, results, rewards, hooks' types, causes and errors."""
