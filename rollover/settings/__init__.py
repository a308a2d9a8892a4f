"""The machinery of configuration: a schema of frozen dataclasses, TOML, and which settings may change on resume."""
