"""Devices and their performance: a catalogue, the cost model of rollout, training and links, and the calibration that
measures a machine and fits the model to it.

Measuring needs torch and an idle machine; everything else needs neither.
"""
