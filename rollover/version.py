"""The version of Rollover, for the package's metadata and for all modules that write it down."""

__version__ = "0.2.0"
