"""Supplies the prompts of a run: kinds of source, their mixture, tokenisation, and supervised examples.

To add a kind of source, write one file in ``sources/`` and its row in ``sources/__init__.py``. ``environments`` decides
what a response to a prompt is worth.
"""
