"""The configuration: a module for each section, and those that read and check it."""
