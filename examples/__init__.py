"""The gallery: complete runs, each one command, with what they are expected to show."""
