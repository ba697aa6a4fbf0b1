"""The commands `sandhost fs`, `fd` and `llm`, for shell scripts inside a child."""
