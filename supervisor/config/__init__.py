"""The configuration: one file for each section, and the whole that reads and checks them."""
