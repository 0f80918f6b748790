"""Agent programs in sandboxes: their model API and their processes, served without polling."""
