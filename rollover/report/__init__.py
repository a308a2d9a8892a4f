"""Reports of a run: metrics, live progress, the closing table and the HTML report. Needs no torch.

Everything here reads a run directory or what the loop hands over; nothing here is read by training.
"""
