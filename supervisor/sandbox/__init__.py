"""The walls of a child: which layers, which this machine gives, how a start asks."""
