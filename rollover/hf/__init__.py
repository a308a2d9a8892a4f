"""All knowledge of a Hugging Face model folder. Needs no torch."""
