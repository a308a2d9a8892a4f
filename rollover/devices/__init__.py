"""A machine measured with the embedded engine and trainer, as an entry for the planner's catalogue.

Measuring needs torch and an idle machine; fitting needs neither.
"""
