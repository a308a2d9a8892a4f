"""SGLang servers as an engine."""
