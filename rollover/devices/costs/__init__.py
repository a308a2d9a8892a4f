"""Costs of rollout, training and weight updates, in seconds and bytes.

* ``links``: transfers and collectives over one link.
* ``passes``: tokens, FLOPs and parameters read in one pass through the model.
* ``rollout``: decoding, prefill and the KV cache of a replica.
* ``training``: memory and time of a training step.
* ``records``: what these make: kinds of replica and training plans.

Every time is a specified figure of a device or link times an efficiency of the catalogue; nothing else is fitted. All
formulas are sums over the tokens of a decoder-only transformer: 2 FLOPs per multiplied parameter and 4 L q per token of
context in a forward pass, three times that for forward and backward (arXiv 2205.05198), with L layers and a query width
of q.
"""
