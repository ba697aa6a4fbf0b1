"""The calls on LLM fds: a table, and one module for each group of calls."""
